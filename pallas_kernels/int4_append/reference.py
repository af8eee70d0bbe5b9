"""Implements `api.int4_append` in plain jnp: quantises the new tokens and scatters their rows."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.cache import LayerCache, physical_pages
from jsparse.cache.key_constants import KeyFrame, into_frame
from jsparse.pallas_kernels.int4_keys import Int4Keys, quantise
from jsparse.shapes import ChunkKV, Lengths, Rows


def int4_append(
    keys: Int4Keys,
    layer: LayerCache,
    k: ChunkKV,
    valid: Rows,
    first: Lengths,
    *,
    frame: KeyFrame | None = None,
    channels: Int32[Array, "B K r"] | None = None,
) -> Int4Keys:
    """Implements `api.int4_append` in plain jnp."""
    steps = jnp.arange(k.shape[1], dtype=jnp.int32)
    slots = first[:, :, None] + steps
    ok = (steps < valid[:, None])[:, None] & (slots >= 0) & (slots < layer.capacity)
    pages = physical_pages(layer, jnp.where(ok, slots // layer.page_size, 0))
    at = (
        jnp.where(ok, pages, keys.scale.shape[0]),
        slots % layer.page_size,
    )  # out of range: dropped
    rows = k.astype(layer.k.dtype).swapaxes(1, 2)
    if frame is not None:
        rows = into_frame(rows, frame, jnp.where(ok, slots, 0))
    if channels is not None:
        rows = jnp.take_along_axis(rows, channels[:, :, None], axis=-1)
    return Int4Keys(
        *(pool.at[at].set(new, mode="drop") for pool, new in zip(keys, quantise(rows), strict=True))
    )
