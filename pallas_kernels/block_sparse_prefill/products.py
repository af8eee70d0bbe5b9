# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
"""The products of a warpgroup's 64 queries with blocks of keys: by wgmma, or in the interpreter."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jsparse.pallas_kernels.block_sparse_prefill.problem import BLOCK, ROWS, Problem

Issued = Callable[[], None]


class Products(NamedTuple):
    """Products, each of which calls `issued` once tensor cores have it, before it has finished.

    Attributes:
        logits: (q, k in shared memory; issued) -> q·kᵀ, float32[rows, block].
        add_values: (o, float32[rows, H]; weights, [rows, block]; v in shared memory; issued)
            -> o + weights·v.
        both: (o; weights; v, q, k in shared memory; issued) -> `add_values` and the next block's
            `logits`, issued together.
    """

    logits: Callable[[Any, Any, Issued], Any]
    add_values: Callable[[Any, Any, Any, Issued], Any]
    both: Callable[[Any, Any, Any, Any, Any, Issued], tuple[Any, Any]]


def products(p: Problem) -> Products:
    """Returns the products for a GPU or for the interpreter."""
    if not p.interpret:
        return Products(_logits, _add_values, _both)

    def read(ref: Any) -> Any:
        x = ref[...]
        plgpu.commit_smem()  # as wgmma, whose reads precede the copies that wait for its end
        return x

    def logits(q_s: Any, k_s: Any, issued: Issued) -> Any:
        issued()
        return jnp.dot(read(q_s), read(k_s).T, preferred_element_type=jnp.float32)

    def add_values(o: Any, weights: Any, v_s: Any, issued: Issued) -> Any:
        issued()
        return o + jnp.dot(weights, read(v_s), preferred_element_type=jnp.float32)

    def both(o: Any, weights: Any, v_s: Any, q_s: Any, k_s: Any, issued: Issued) -> Any:
        return add_values(o, weights, v_s, issued), logits(q_s, k_s, lambda: None)

    return Products(logits, add_values, both)


def zeros(columns: int) -> Any:
    """Returns float32[rows, columns] of zeros, as a product's registers."""
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)


def _logits(q_s: Any, k_s: Any, issued: Issued) -> Any:
    def run(acc: Any) -> Any:
        plgpu.wgmma(acc, q_s, k_s.transpose((1, 0)))
        issued()
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, BLOCK), jnp.float32))


def _add_values(o: Any, weights: Any, v_s: Any, issued: Issued) -> Any:
    def run(acc: Any) -> None:
        plgpu.wgmma(acc, weights, v_s)
        issued()

    return pl.run_state(run)(plgpu.ACC.init(o))


def _both(o: Any, weights: Any, v_s: Any, q_s: Any, k_s: Any, issued: Issued) -> tuple[Any, Any]:
    def run(accs: Any) -> None:
        plgpu.wgmma(accs[0], weights, v_s)
        plgpu.wgmma(accs[1], q_s, k_s.transpose((1, 0)))
        issued()

    return pl.run_state(run)((plgpu.ACC.init(o), plgpu.ACC.init(zeros(BLOCK))))
