"""Processes points in blocks, which bounds the size of arrays per block."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jsparse.shapes import Rows

BLOCK_BYTES = 2**27  # of the largest array per block


class Blocks(NamedTuple):
    """Blocks of equal size along an axis of points; the last overlaps the one before."""

    num_points: int
    size: int

    @classmethod
    def of(cls, num_points: int, numbers_each: int) -> "Blocks":
        """Returns blocks as large as BLOCK_BYTES allows, with `numbers_each` numbers per point."""
        fitting = max(BLOCK_BYTES // (4 * numbers_each), 1)
        return cls(num_points, min(1 << (fitting.bit_length() - 1), num_points))

    def first(self, i: Array) -> Array:
        """Returns the first point of block i."""
        return jnp.minimum(i * self.size, self.num_points - self.size)

    def fresh(self, i: Array, number: Rows) -> Bool[Array, "B m"]:
        """Marks the points of block i that no earlier block has, among a row's first `number`."""
        at = self.first(i) + jnp.arange(self.size, dtype=jnp.int32)
        return (at >= i * self.size) & (at < number[:, None])

    def cut(self, x: Array, i: Array, axis: int) -> Array:
        """Returns block i of an array."""
        return jax.lax.dynamic_slice_in_dim(x, self.first(i), self.size, axis)

    def put(self, whole: Array, part: Array, i: Array) -> Array:
        """Writes block i of [B, K, C, …]."""
        return jax.lax.dynamic_update_slice_in_dim(whole, part, self.first(i), 2)

    def run(self, number: Rows, block: Callable[[Array, Any], Any], carry: Any) -> Any:
        """Loops over the blocks that contain the first `number` points of the longest row."""
        return jax.lax.fori_loop(0, -(-jnp.max(number) // self.size), block, carry)
