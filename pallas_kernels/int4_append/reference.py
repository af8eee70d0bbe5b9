"""Implements `api.int4_append` in plain jnp: quantises the new tokens and scatters their rows."""

import jax.numpy as jnp

from jsparse.cache import LayerCache, physical_pages
from jsparse.pallas_kernels.int4_keys import Int4Keys, quantise
from jsparse.shapes import ChunkKV, Lengths, Rows


def int4_append(
    keys: Int4Keys, layer: LayerCache, k: ChunkKV, valid: Rows, first: Lengths
) -> Int4Keys:
    """Implement `api.int4_append` in plain jnp."""
    steps = jnp.arange(k.shape[1], dtype=jnp.int32)
    slots = first[:, :, None] + steps
    ok = (steps < valid[:, None])[:, None] & (slots >= 0) & (slots < layer.capacity)
    pages = physical_pages(layer, jnp.where(ok, slots // layer.page_size, 0))
    at = (
        jnp.where(ok, pages, keys.scale.shape[0]),
        slots % layer.page_size,
    )  # out of range: dropped
    rows = quantise(k.astype(layer.k.dtype).swapaxes(1, 2))
    return Int4Keys(
        *(pool.at[at].set(new, mode="drop") for pool, new in zip(keys, rows, strict=True))
    )
