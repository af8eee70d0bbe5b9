"""Writes quantized matrices in the formats of safetensors checkpoints, slowly and simply.

A format draws codes, scales and zero points, and returns the tensors of a module by suffix and the
float32 numbers that these are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bench.lib.quantized_files import QUANTIZERS, compressed, integers_of
from tests.support.writers import Tensors

Made = tuple[Tensors, np.ndarray]


class Format(NamedTuple):
    """A quantization_config, its writer, and the format of the blocks of 256 columns.

    `blocks`: bits, group, dtype of scales, whether there are mins, whether codes are floats; None
    for a format that cannot stay in blocks.
    """

    config: dict[str, Any]
    write: Callable[[np.random.Generator, int, int], Made]
    blocks: tuple[int, int, str, bool, bool] | None


def expanded(array: np.ndarray, area: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Repeats an item for each area [rows, columns] as one for each number."""
    made = np.zeros(shape, array.dtype)
    for row in range(shape[0]):
        for column in range(shape[1]):
            made[row, column] = array[row // area[0], column // area[1]]
    return made


def scales(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    return rng.uniform(0.01, 0.05, shape).astype(dtype)


def areas(out: int, width: int, area: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the area with 0 replaced by a matrix's size, and the numbers of areas."""
    own = area[0] or out, area[1] or width
    return own, (-(-out // own[0]), -(-width // own[1]))


def numbers_of(codes: Any, zeros: Any, scale: Any, area: Any) -> np.ndarray:
    """Returns (code - zero) · scale in float32."""
    zero = expanded(zeros.astype(np.float32), area, codes.shape)
    return (codes.astype(np.float32) - zero) * expanded(scale.astype(np.float32), area, codes.shape)


def fp8(area: tuple[int, int], suffix: str, dtype: Any, scale_shape: Any = None) -> Any:
    def write(rng: np.random.Generator, out: int, width: int) -> Made:
        own, counts = areas(out, width, area)
        raw = rng.integers(0, 0x7F, (out, width)) | rng.integers(0, 2, (out, width)) << 7
        codes = raw.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        scale = scales(rng, counts, dtype) / 256
        numbers = numbers_of(codes, np.zeros(counts), scale, own)
        stored = scale if scale_shape is None else scale.reshape(scale_shape)
        return {"weight": codes, suffix: stored, "input_scale": np.ones(1, np.float32)}, numbers

    return write


def int8(group: int, *, zero_points: bool) -> Any:
    def write(rng: np.random.Generator, out: int, width: int) -> Made:
        own, counts = areas(out, width, (1, group))
        codes = rng.integers(-128, 128, (out, width)).astype(np.int8)
        scale = scales(rng, counts, ml_dtypes.bfloat16)
        zeros = rng.integers(-128, 128, counts).astype(np.int8) * zero_points
        tensors = {"weight": codes, "weight_scale": scale}
        if zero_points:
            tensors["weight_zero_point"] = zeros
        return tensors, numbers_of(codes, zeros, scale, own)

    return write


def pack_quantized(bits: int, group: int, *, zero_points: bool) -> Any:
    def write(rng: np.random.Generator, out: int, width: int) -> Made:
        own, counts = areas(out, width, (1, group))
        half = 1 << bits - 1
        codes = rng.integers(-half, half, (out, width))
        zeros = rng.integers(-half, half, counts) * zero_points
        scale = scales(rng, counts, ml_dtypes.bfloat16)
        tensors = {
            "weight_packed": integers_of(codes + half, bits),
            "weight_scale": scale,
            "weight_shape": np.array([out, width], np.int64),
        }
        if zero_points:
            packed = integers_of((zeros + half).T, bits).T
            tensors["weight_zero_point"] = np.ascontiguousarray(packed)
        return tensors, numbers_of(codes, zeros, scale, own)

    return write


def gptq(bits: int, group: int, *, less: int, symmetric: bool = False) -> Any:
    """`less` is subtracted from each zero point, all of an integer at once."""

    def write(rng: np.random.Generator, out: int, width: int) -> Made:
        own, counts = areas(out, width, (1, group))
        codes = rng.integers(0, 1 << bits, (out, width))
        zeros = rng.integers(0, 1 << bits, counts)
        zeros = np.full(counts, 1 << bits - 1) if symmetric else zeros
        scale = scales(rng, counts, np.float16)
        tensors = {
            "qweight": np.ascontiguousarray(integers_of(codes, bits).T),
            "qzeros": integers_of(zeros.T, bits) - integers_of(np.full((1, 8), less), bits)[0, 0],
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": (np.arange(width) // own[1]).astype(np.int32),
        }
        return tensors, numbers_of(codes, zeros, scale, own)

    return write


def awq(group: int) -> Any:
    def write(rng: np.random.Generator, out: int, width: int) -> Made:
        own, counts = areas(out, width, (1, group))
        codes, zeros = rng.integers(0, 16, (out, width)), rng.integers(0, 16, counts)
        scale, order = scales(rng, counts, np.float16), (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": integers_of(codes.T, 4, order),
            "qzeros": integers_of(zeros.T, 4, order),
            "scales": np.ascontiguousarray(scale.T),
        }
        return tensors, numbers_of(codes, zeros, scale, own)

    return write


BLOCK_FP8, AWQ, W4A16 = (QUANTIZERS[name].config for name in ("fp8-blocks", "awq", "w4a16"))
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "dynamic": {"-:.*lm_head": {}},
    "group_size": 64,
    "quant_method": "gptq",
    "sym": False,
}
PER_TENSOR = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None}
_F32, _BF16 = np.float32, ml_dtypes.bfloat16
FORMATS = {
    "fp8 of a tensor": Format(
        PER_TENSOR, fp8((0, 0), "weight_scale", _F32, ()), (8, 128, "float32", False, True)
    ),
    "fp8 of rows": Format(
        PER_TENSOR, fp8((1, 0), "weight_scale_inv", _F32), (8, 128, "float32", False, True)
    ),
    "fp8 of blocks": Format(
        BLOCK_FP8, fp8((128, 128), "weight_scale_inv", _BF16), (8, 128, "bfloat16", False, True)
    ),
    "float-quantized": Format(
        compressed("float-quantized", type="float"),
        fp8((1, 0), "weight_scale", _BF16),
        (8, 128, "bfloat16", False, True),
    ),
    "int-quantized": Format(
        compressed("int-quantized"), int8(0, zero_points=False), (8, 128, "bfloat16", False, False)
    ),
    "naive-quantized with zero points": Format(
        compressed("naive-quantized", strategy="group", group_size=32, symmetric=False),
        int8(32, zero_points=True),
        None,
    ),
    "pack-quantized, 4 bits": Format(
        W4A16, pack_quantized(4, 128, zero_points=False), (4, 128, "bfloat16", False, False)
    ),
    "pack-quantized, 4 bits with zero points": Format(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
        pack_quantized(4, 64, zero_points=True),
        (4, 64, "bfloat16", True, False),
    ),
    "pack-quantized, 8 bits": Format(
        compressed("pack-quantized"),
        pack_quantized(8, 0, zero_points=False),
        (8, 128, "bfloat16", False, False),
    ),
    "gptq": Format(GPTQ, gptq(4, 64, less=1), (4, 64, "float16", True, False)),
    "gptq_v2": Format(
        GPTQ | {"checkpoint_format": "gptq_v2"},
        gptq(4, 64, less=0),
        (4, 64, "float16", True, False),
    ),
    "gptq, symmetric with one group": Format(
        GPTQ | {"sym": True, "group_size": -1, "desc_act": True},
        gptq(4, 0, less=1, symmetric=True),
        (4, 128, "float16", False, False),
    ),
    "gptq, 8 bits": Format(GPTQ | {"bits": 8, "group_size": 32}, gptq(8, 32, less=1), None),
    "awq": Format(AWQ, awq(128), (4, 128, "float16", True, False)),
}
"""Formats by name."""


def quantized(format_: Format, tensors: Tensors, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Replaces the linear maps of a model's layers by random quantized ones.

    Returns the tensors of the quantized checkpoint, and those of the same model in float32.
    """
    rng = np.random.default_rng(seed)
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        parts, plain[name] = format_.write(rng, *tensor.shape)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    return stored, plain
