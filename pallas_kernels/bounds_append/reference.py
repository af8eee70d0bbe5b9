"""Implements `api.bounds_append` in plain jnp: recomputes touched pages' bounds from K."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.cache import LayerCache, physical_pages, read_pages
from jsparse.cache.key_constants import KeyFrame, into_frame
from jsparse.pallas_kernels.key_bounds import Bounds
from jsparse.shapes import Lengths, Rows


def bounds_append(
    bounds: Bounds,
    layer: LayerCache,
    valid: Rows,
    first: Lengths,
    *,
    touched: int,
    frame: KeyFrame | None = None,
) -> Bounds:
    """Implements `api.bounds_append` in plain jnp."""
    size = layer.page_size
    pages = first[..., None] // size + jnp.arange(touched, dtype=jnp.int32)
    end = jnp.minimum(first + valid[:, None], layer.lengths)[..., None]
    fresh = (
        (pages >= 0) & (pages < layer.num_pages) & (pages * size < end) & (valid > 0)[:, None, None]
    )
    logical = jnp.where(fresh, pages, 0)
    at = jnp.where(fresh, physical_pages(layer, logical), layer.k.shape[0])  # out of range: dropped
    k = read_pages(layer.k, layer, logical)
    held = _held(logical, layer)[..., None]
    low = jnp.min(jnp.where(held, k, jnp.inf), axis=3).astype(k.dtype)
    high = jnp.max(jnp.where(held, k, -jnp.inf), axis=3).astype(k.dtype)
    if frame is not None:
        low, high = (into_frame(ends, frame, logical * size) for ends in (low, high))
    kept = bounds.of(low, high)
    return type(bounds)(
        *(pool.at[at].set(new, mode="drop") for pool, new in zip(bounds, kept, strict=True))
    )


def _held(logical: Int32[Array, "B K n"], layer: LayerCache) -> Bool[Array, "B K n P"]:
    """Marks the slots of these pages that have a token."""
    slots = logical[..., None] * layer.page_size + jnp.arange(layer.page_size, dtype=jnp.int32)
    return slots < layer.lengths[..., None, None]
