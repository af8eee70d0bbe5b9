"""Calls jax-triton so that XLA includes the kernel in its CUDA graphs.

jax-triton 0.3 lowers to a custom call of XLA's oldest interface, which cannot be in a graph: each
such kernel ends one, and the host starts the next (5 to 7 µs per kernel on an H200). The target of
the newer interface reads the same bytes.
"""

from functools import partial
from typing import Any

import jax
from jax.interpreters import mlir
from jax_triton import triton_lib

TARGET = "triton_kernel_call_ffi"  # from jaxlib's CUDA plugin

_legacy_lowering = partial(triton_lib.triton_kernel_call_lowering, triton_lib.get_cuda_backend)


def _lowering(ctx: mlir.LoweringRuleContext, *arrays: Any, **params: Any) -> Any:
    results = _legacy_lowering(ctx, *arrays, **params)
    if params["custom_call_target_name"] != TARGET:  # not our call
        return results
    legacy = results[0].owner
    kernel = legacy.attributes["backend_config"].value_bytes
    legacy.erase()
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(params["input_output_aliases"]))
    return rule(ctx, *arrays, opaque=kernel)


mlir.register_lowering(triton_lib.triton_kernel_call_p, _lowering, platform="cuda")

triton_call = partial(triton_lib.triton_call, custom_call_target_name=TARGET)
