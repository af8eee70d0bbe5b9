"""Keeps matrices as 8-bit blocks, GGUF's Q8_0, and multiplies with them.

A block are 32 numbers that a product sums over: 8-bit integers, and one scale in float16 for all of
them. Activations stay as they are (W8A16). A matrix is a dict of two arrays, which take 8.5 bits
per number. Source: llama.cpp's `block_q8_0`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int8

BLOCK = 32
LARGEST, TRIED = 127, 32
LEAST = 2.0**-24  # the smallest scale that float16 has
# of a normal distribution of deviation 1, spread evenly over the integers
_RANDOM_SCALE = 1 / 73.3


class Blocks(TypedDict):
    """Holds a matrix in blocks of 32 numbers along one of its axes.

    Attributes:
        values: the integers, of the matrix' shape.
        scales: one per block: that axis is 32 times as short.
    """

    values: Int8[Array, "rows columns"]
    scales: Float16[Array, "blocks_or_rows columns_or_blocks"]


@partial(jax.jit, static_argnames=("axis",))
def to_blocks(matrix: Float[Array, "rows columns"], axis: int) -> Blocks:
    """Returns a matrix as blocks along an axis, whose size must be a multiple of 32.

    The largest number of a block becomes an integer from 127 down to 96: the one with which the
    squares of all errors sum up to least. llama.cpp always takes 127.
    """
    rows = jnp.moveaxis(matrix.astype(jnp.float32), axis, -1)
    blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)

    def with_largest(integer: Array) -> tuple[Array, Array]:
        """Returns the scales with which the largest becomes this integer, and the errors."""
        scales = jnp.where(largest > 0, jnp.maximum(largest / integer, LEAST), largest)
        scales = scales.astype(jnp.float16)
        found = jnp.sum((_rounded(blocks, scales) * _wide(scales) - blocks) ** 2, axis=-1)
        return scales, found

    def tried(nth: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        scales, found = with_largest(jnp.float32(LARGEST) - nth)
        better = found < best[1]
        return jnp.where(better, scales, best[0]), jnp.where(better, found, best[1])

    # blocks that are not finite keep these, which are not either
    first = with_largest(jnp.float32(LARGEST))
    scales, _ = jax.lax.fori_loop(1, TRIED, tried, first)
    values = _rounded(blocks, scales).astype(jnp.int8).reshape(rows.shape)
    return {"values": jnp.moveaxis(values, -1, axis), "scales": jnp.moveaxis(scales, -1, axis)}


def _rounded(blocks: Float[Array, "*n 32"], scales: Float16[Array, "*n"]) -> Float[Array, "*n 32"]:
    steps = blocks / jnp.where(scales == 0, 1.0, _wide(scales)[..., 0])[..., None]
    return jnp.clip(jnp.round(steps), -LARGEST, LARGEST)


def _wide(scales: Float16[Array, "*n"]) -> Float[Array, "*n 1"]:
    return scales.astype(jnp.float32)[..., None]


def dequantized(matrix: Blocks, axis: int, dtype: Any) -> Float[Array, "rows columns"]:
    """Returns the numbers of a matrix whose blocks are along this axis."""
    values, scales = (part.astype(jnp.float32) for part in (matrix["values"], matrix["scales"]))
    blocks = values.reshape(*values.shape[:axis], -1, BLOCK, *values.shape[axis + 1 :])
    numbers = blocks * jnp.expand_dims(scales, axis + 1)
    return numbers.reshape(values.shape).astype(dtype)


def side_by_side[Other](
    x: Other, matrix: Blocks, axis: int, dtype: Any
) -> tuple[Other, Float[Array, "rows columns"]]:
    """Returns `x` and a matrix' numbers for a product with it, not before both are there.

    Else XLA would widen all matrices of a model at the beginning of a program, or of a loop.
    """
    x, matrix = jax.lax.optimization_barrier((x, matrix))
    return x, dequantized(matrix, axis, dtype)


class QuantizedDense(nn.Module):
    """Computes what `nn.Dense` does, with a kernel [in, out] of blocks along its first axis."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        kernel = self.param("kernel", empty((x.shape[-1], self.features), 0))
        x, numbers = side_by_side(x, kernel, 0, x.dtype)
        y = x @ numbers
        if self.use_bias:
            y += self.param("bias", nn.initializers.zeros, (self.features,), x.dtype)
        return y


def dense(features: int, dtype: Any, *, name: str, quantized: bool, use_bias: bool = False) -> Any:
    """Returns the module of a linear map, within a module whose weights are of this kind."""
    if quantized:
        return QuantizedDense(features, use_bias, name=name)
    return nn.Dense(features, use_bias=use_bias, param_dtype=dtype, name=name)


def shape_of_scales(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix whose blocks are along an axis."""
    return tuple(size // BLOCK if nth == axis else size for nth, size in enumerate(shape))


def empty(shape: tuple[int, int], axis: int) -> Callable[[Array], Blocks]:
    """Returns what initialises a parameter of this shape, with blocks along this axis."""
    sizes = shape_of_scales(shape, axis)
    return lambda _: {"values": jnp.zeros(shape, jnp.int8), "scales": jnp.zeros(sizes, jnp.float16)}


@partial(jax.jit, static_argnames=("shape", "dtype"))
def random_part(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns random values or scales, of numbers with a deviation of 0.02."""
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -LARGEST, LARGEST + 1, jnp.int8)
    return jnp.full(shape, 0.02 * _RANDOM_SCALE, dtype)
