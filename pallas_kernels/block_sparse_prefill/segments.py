"""Reads blocks of 128 slots of a layer."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jsparse.cache import LayerCache, PagePool, read_pages

BLOCK = 128  # queries, and keys, per block
LOGITS = 2**24  # of a segment: more would not stay in an H200's L2 cache, fewer need more passes


def blocks_per_segment(logits: int, key_blocks: int) -> int:
    """Returns the number of blocks of a segment, given the number of logits per block."""
    return max(1, min(LOGITS // logits, key_blocks))


def num_segments(kv: LayerCache, size: int) -> Int32[Array, ""]:
    """Returns the number of segments of `size` blocks that hold the longest row."""
    return -(-jnp.max(kv.lengths) // (size * BLOCK))


def segment(
    pool: Array | PagePool, kv: LayerCache, block: Int32[Array, ""], size: int
) -> Float[Array, "B K s H"]:
    """Returns the slots of `size` blocks of each head from `block` on.

    Pages past the last one repeat it, under slots past the capacity.
    """
    pages = size * BLOCK // kv.page_size
    logical = block * (BLOCK // kv.page_size) + jnp.arange(pages, dtype=jnp.int32)
    logical = jnp.broadcast_to(jnp.minimum(logical, kv.num_pages - 1), (*kv.lengths.shape, pages))
    read = read_pages(pool, kv, logical)
    return read.reshape(*kv.lengths.shape, pages * kv.page_size, -1)
