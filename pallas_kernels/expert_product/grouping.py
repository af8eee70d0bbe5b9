"""Sorts pairs of a row and an expert into blocks of one expert each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Groups(NamedTuple):
    """Blocks of pairs with the same expert.

    Attributes:
        pairs: the pairs of each block, numbered as in `chosen` when flattened; the number of pairs
            in places without one.
        experts: the expert of each block; E for blocks without pairs, which are the last ones.
    """

    pairs: Int32[Array, "blocks size"]
    experts: Int32[Array, "blocks"]


def grouped(chosen: Int32[Array, "k R"], experts: int, size: int) -> Groups:
    """Groups pairs into blocks of `size`; those whose expert is not in 0 … `experts` - 1 are left.

    The number of blocks is the most that any choice needs.
    """
    pairs = chosen.size
    flat = jnp.clip(chosen.reshape(-1), 0, experts)
    blocks = pairs // size + min(experts, pairs)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    by_expert = flat[order]
    names = jnp.arange(experts + 1, dtype=jnp.int32)
    start = jnp.searchsorted(by_expert, names).astype(jnp.int32)  # of each expert's pairs
    used = (jnp.diff(start) + size - 1) // size
    end = jnp.cumsum(used, dtype=jnp.int32)  # of each expert's blocks
    first = jnp.append(end - used, blocks)  # pairs without an expert are past the last block
    nth = jnp.arange(pairs, dtype=jnp.int32)
    place = first[by_expert] * size + nth - start[by_expert]
    listed = jnp.full(blocks * size, pairs, jnp.int32).at[place].set(order, mode="drop")
    owner = jnp.searchsorted(end, jnp.arange(blocks, dtype=jnp.int32), side="right")
    return Groups(listed.reshape(blocks, size), owner.astype(jnp.int32))
