"""Reads blocks of 128 slots of a layer."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jsparse.cache import LayerCache, PagePool, read_pages

BLOCK = 128  # queries, and keys, per block


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
