"""Layouts of a quantized matrix's tensors in safetensors: their names, shapes and packed codes.

Functions for codes work on numpy and JAX arrays alike, so that a matrix can be unpacked on the host
or in a jitted conversion. They take 32-bit integers as their bytes, so that no temporary array has
32 bits per code. Sources: compressed-tensors' `pack_to_int32`, GPTQModel's and AutoAWQ's layers.
"""

from typing import Any, NamedTuple

import numpy as np

from jsparse.models.quantization_config import Scheme


class Suffixes(NamedTuple):
    """The ends of the names of a matrix's tensors; `scales` are alternatives."""

    codes: str
    scales: tuple[str, ...]
    zeros: str
    shape: str | None = None
    groups: str | None = None  # the group of each column


SUFFIXES = {
    "values": Suffixes("weight", ("weight_scale", "weight_scale_inv"), "weight_zero_point"),
    "packed": Suffixes(
        "weight_packed", ("weight_scale",), "weight_zero_point", "weight_shape", "weight_g_idx"
    ),
    "gptq": Suffixes("qweight", ("scales",), "qzeros", groups="g_idx"),
    "awq": Suffixes("qweight", ("scales",), "qzeros"),
}
"""The suffixes of each Scheme.layout."""


def shape_of(codes: tuple[int, int], scheme: Scheme) -> tuple[int, int]:
    """Returns the shape (out, in) of a matrix from that of its codes; "packed" pads columns."""
    rows, columns = codes
    if scheme.layout == "gptq":
        return columns, rows * scheme.per_integer
    if scheme.layout == "awq":
        return columns * scheme.per_integer, rows
    return rows, columns * (scheme.per_integer if scheme.layout == "packed" else 1)


def scales_shape(areas: tuple[int, int], scheme: Scheme) -> tuple[int, int]:
    """Returns the shape of the scales of areas, [below each other, beside each other]."""
    return (areas[1], areas[0]) if scheme.layout in ("gptq", "awq") else areas


def zeros_shape(areas: tuple[int, int], scheme: Scheme) -> tuple[int, int]:
    """Returns the shape of the zero points of areas, those of successive rows in one integer."""
    if scheme.layout == "values":
        return areas
    return scales_shape((-(-areas[0] // scheme.per_integer), areas[1]), scheme)


def codes_of(stored: Any, scheme: Scheme, width: int) -> Any:
    """Returns the codes [out, width] of a matrix.

    Args:
        stored: the codes, or the bytes of integers: [out, n, 4] with codes of successive columns
            ("packed"), [n, out, 4] ("gptq"), or [width, n, 4] with codes of successive rows
            ("awq").
        scheme: the scheme.
        width: the number of columns.

    Returns:
        uint8, 0 to 15, for 4 bits; otherwise int8 or float8.
    """
    if scheme.layout == "values":
        return stored
    if scheme.layout == "awq":
        return _unpacked(stored, scheme).T
    in_rows = stored.swapaxes(0, 1) if scheme.layout == "gptq" else stored
    return _unpacked(in_rows, scheme)[:, :width]


def scales_of(stored: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Returns the scales of areas, [below each other, beside each other]."""
    return stored.T if scheme.layout in ("gptq", "awq") else stored


def zeros_of(stored: np.ndarray, scheme: Scheme, rows: int) -> np.ndarray:
    """Returns the zero points of areas, int8 [rows, areas beside each other].

    They are in the range of codes as `codes_of` returns them.
    """
    if scheme.layout == "values":
        return stored
    if scheme.less_one:
        # 1 was subtracted from each code by one subtraction from the integer, which may borrow
        stored = stored.view(np.uint32) + np.uint32(0x11111111 if scheme.bits == 4 else 0x01010101)
    words = bytes_of(stored)
    in_rows = words.swapaxes(0, 1) if scheme.layout == "packed" else words
    return _unpacked(in_rows, scheme)[:, :rows].T.view(np.int8)


def bytes_of(integers: np.ndarray) -> np.ndarray:
    """Returns the bytes [..., 4] of 32-bit integers, the lowest first."""
    little = np.ascontiguousarray(integers, "<i4")
    return little.view(np.uint8).reshape(*integers.shape, 4)


def _unpacked(words: Any, scheme: Scheme) -> Any:
    """Returns the codes, [rows, n · codes per integer], in integers [rows, n, 4].

    The first code is in the lowest bits; in AWQ codes 2, 4, 6, 1, 3, 5 and 7 of 8 follow it.
    """
    codes = words
    if scheme.bits == 4:
        codes = (words[..., None] >> np.array([0, 4], np.uint8)) & 15
    if scheme.layout == "awq":
        codes = codes.reshape(*words.shape[:2], 2, 4).swapaxes(-1, -2)
    codes = codes.reshape(len(words), -1)
    return codes if scheme.bits == 4 else (codes ^ 128).view(np.int8)
