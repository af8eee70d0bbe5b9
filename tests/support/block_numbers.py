"""Computes the numbers of a matrix in blocks from the definition in `Blocks`, in float64."""

from typing import Any

import ml_dtypes
import numpy as np

from jsparse.pallas_kernels.weight_blocks import Form


def codes_of(matrix: Any, form: Form) -> np.ndarray:
    """Returns the codes [out, in]."""
    values = np.asarray(matrix["values"])
    if form.bits == 8:
        return values.astype(np.float64)
    out = len(values)
    blocks = values.astype(np.int64).reshape(out, -1, 16)
    codes = np.concatenate([blocks & 15, blocks >> 4], -1)
    if form.bits > 4:
        high = np.asarray(matrix["high"]).astype(np.int64).reshape(out, len(blocks[0]), -1)
        for n in range(32):
            h, j, i = n // 16, n // 4 % 4, n % 4
            if form.bits == 5:
                codes[..., n] += 16 * (high[..., i] >> 2 * j + h & 1)
            else:
                codes[..., n] += 16 * (high[..., 4 * h + i] >> 2 * j & 3)
    half = 2 ** (form.bits - 1)
    return np.where(codes < half, codes, codes - 2 * half).reshape(out, -1).astype(np.float64)


def numbers_of(matrix: Any, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers [out, in], and sizes to which rounding errors of products are relative.

    A size is that of the scaled code, of half the codes' range if this is added, and of the offset.
    """
    codes = codes_of(matrix, form)

    def each(name: str) -> np.ndarray:
        factors = np.asarray(matrix[name], np.float64)
        return np.repeat(factors, codes.shape[1] // len(factors), axis=0).T

    scales = each("scales") * (each("super_scales") if form.supers else 1)
    if not form.mins:
        return codes * scales, np.abs(codes * scales)
    half = 2.0 ** (form.bits - 1)
    offsets = each("mins") * (each("super_mins") if form.supers else scales)
    sizes = (np.abs(codes) + half) * np.abs(scales) + np.abs(offsets)
    return (codes + half) * scales - offsets, sizes


def in_bfloat16(matrix: Any, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers in bfloat16, and by how much they may differ.

    Those with an offset are computed in float32, with an addend of up to 2^8 times the scale, so
    they may be rounded to a neighbour.
    """
    numbers, sizes = numbers_of(matrix, form)
    off = 2.0**-19 * sizes * form.mins
    low, middle, high = (
        some.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        for some in (numbers - off, numbers, numbers + off)
    )
    return middle, high - low
