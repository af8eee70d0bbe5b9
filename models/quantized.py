"""Converts matrices to 8-bit blocks, GGUF's Q8_0.

Activations keep their type (W8A16). A matrix is a dict of two arrays
(jsparse.pallas_kernels.weight_blocks).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16

from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks

LARGEST, TRIED = 127, 32
LEAST = 2.0**-24  # the smallest scale in float16
# of a normal distribution of deviation 1, spread evenly over the integers
_RANDOM_SCALE = 1 / 73.3


@jax.jit
def to_blocks(rows: Float[Array, "out in"]) -> Blocks:
    """Returns a matrix as blocks along its rows, whose length must be a multiple of 32.

    A block's largest number becomes the integer from 127 down to 96 with the least sum of squared
    errors. llama.cpp always uses 127.
    """
    blocks = rows.astype(jnp.float32).reshape(rows.shape[0], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)

    def with_largest(integer: Array) -> tuple[Array, Array]:
        """Returns the scales that map the largest number to this integer, and the errors."""
        scales = jnp.where(largest > 0, jnp.maximum(largest / integer, LEAST), largest)
        scales = scales.astype(jnp.float16)
        found = jnp.sum((_rounded(blocks, scales) * _wide(scales) - blocks) ** 2, axis=-1)
        return scales, found

    def tried(nth: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        scales, found = with_largest(jnp.float32(LARGEST) - nth)
        better = found < best[1]
        return jnp.where(better, scales, best[0]), jnp.where(better, found, best[1])

    # blocks that are not finite keep these, which are not finite either
    first = with_largest(jnp.float32(LARGEST))
    scales, _ = jax.lax.fori_loop(1, TRIED, tried, first)
    values = _rounded(blocks, scales).astype(jnp.int8).reshape(rows.shape)
    return {"values": values, "scales": scales.T}


def _rounded(blocks: Float[Array, "*n 32"], scales: Float16[Array, "*n"]) -> Float[Array, "*n 32"]:
    steps = blocks / jnp.where(scales == 0, 1.0, _wide(scales)[..., 0])[..., None]
    return jnp.clip(jnp.round(steps), -LARGEST, LARGEST)


def _wide(scales: Float16[Array, "*n"]) -> Float[Array, "*n 1"]:
    return scales.astype(jnp.float32)[..., None]


def empty(out: int, width: int) -> Callable[[Array], Blocks]:
    """Returns an initialiser for a parameter of this shape."""
    return lambda _: {
        "values": jnp.zeros((out, width), jnp.int8),
        "scales": jnp.zeros((width // BLOCK, out), jnp.float16),
    }


@partial(jax.jit, static_argnames=("shape", "dtype"))
def random_part(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns random values or scales, for numbers with a deviation of 0.02."""
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -LARGEST, LARGEST + 1, jnp.int8)
    return jnp.full(shape, 0.02 * _RANDOM_SCALE, dtype)
