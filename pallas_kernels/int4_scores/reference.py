"""Implements `api.int4_scores` in plain jnp: the CPU path and the kernel's oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import LayerCache, read_heads, read_pages
from jsparse.cache.key_constants import SPAN, KeyFrame, scaled_queries, span_terms
from jsparse.pallas_kernels.int4_keys import Int4Keys, dequantise
from jsparse.selection import Selection, unpack_bits


def int4_scores(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    keys: Int4Keys,
    selection: Selection | None,
    *,
    sm_scale: float,
    frame: KeyFrame | None = None,
    channels: Int32[Array, "B K r"] | None = None,
) -> Float32[Array, "B N slots"]:
    """Implements `api.int4_scores` in plain jnp."""
    batch, heads, head_dim = q.shape
    if selection is None:
        packed, scale, zero = (read_heads(pool, layer) for pool in keys)
        seen = jnp.arange(layer.capacity, dtype=jnp.int32) < layer.lengths[..., None]
    else:
        packed, scale, zero = (_flat(read_pages(pool, layer, selection.ids)) for pool in keys)
        seen = _listed(layer, selection)
    k = dequantise(packed, scale, zero)
    scaled = q if frame is None else scaled_queries(q, frame)
    grouped = scaled.astype(jnp.float32).reshape(batch, k.shape[1], -1, head_dim)
    if channels is not None:
        grouped = jnp.take_along_axis(grouped, channels[:, :, None], axis=-1)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, k, precision=jax.lax.Precision.HIGHEST)
    if frame is not None:
        terms = span_terms(q, frame).reshape(*scores.shape[:3], -1)
        spans = _slots(layer, selection) // SPAN
        scores += jnp.take_along_axis(terms, spans[:, :, None], axis=-1, mode="clip")
    scores *= sm_scale
    return jnp.where(seen[:, :, None], scores, -jnp.inf).reshape(batch, heads, seen.shape[-1])


def _listed(layer: LayerCache, selection: Selection) -> Bool[Array, "B K slots"]:
    """Marks the attended slots of the listed pages."""
    slots = _slots(layer, selection).reshape(*selection.ids.shape, layer.page_size)
    listed = jnp.arange(selection.ids.shape[-1], dtype=jnp.int32) < selection.count[..., None]
    seen = (slots < layer.lengths[..., None, None]) & listed[..., None]
    if selection.bits is not None:
        seen &= unpack_bits(selection.bits, layer.page_size)
    return _flat(seen)


def _slots(layer: LayerCache, selection: Selection | None) -> Int32[Array, "B K slots"]:
    """Returns the slots of the listed pages, or all slots."""
    if selection is None:
        return jax.lax.broadcasted_iota(jnp.int32, (*layer.lengths.shape, layer.capacity), 2)
    within = jnp.arange(layer.page_size, dtype=jnp.int32)
    return _flat(selection.ids[..., None] * layer.page_size + within)


def _flat(pages: Array) -> Array:
    """Reshapes [B, K, C, P, …] to [B, K, C·P, …]."""
    return pages.reshape(*pages.shape[:2], pages.shape[2] * pages.shape[3], *pages.shape[4:])
