"""Matrices in 8-bit blocks, GGUF's Q8_0, and their values.

A block is 32 numbers that a product sums over: 8-bit integers with one float16 scale, so that a
number takes 8.5 bits. Source: llama.cpp's `block_q8_0`.
"""

from typing import Any, TypedDict

import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int8

BLOCK = 32


class Blocks(TypedDict):
    """A matrix [out, in] in blocks of 32 numbers of a row.

    Attributes:
        values: the integers, rows as GGUF stores them.
        scales: one per block, transposed: a kernel reads those of many rows together.
    """

    values: Int8[Array, "out in"]
    scales: Float16[Array, "in_blocks out"]


def dequantized(matrix: Blocks, dtype: Any) -> Float[Array, "out in"]:
    """Returns the numbers of a matrix."""
    values, scales = (part.astype(jnp.float32) for part in (matrix["values"], matrix["scales"]))
    blocks = values.reshape(values.shape[0], -1, BLOCK) * scales.T[..., None]
    return blocks.reshape(values.shape).astype(dtype)
