"""Implements `api.page_bounds` in plain jnp: the CPU path and the kernels' oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import SPAN, KeyFrame, scaled_queries, span_terms
from jsparse.pallas_kernels.key_bounds import Bounds


def page_bounds(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    bounds: Bounds,
    *,
    slack: float,
    group: str,
    sm_scale: float,
    frame: KeyFrame | None = None,
) -> Float32[Array, "B K M"]:
    """Implements `api.page_bounds` in plain jnp."""
    if group == "mean":
        q = mean_queries(q, layer.lengths.shape[1])
    scaled = q if frame is None else scaled_queries(q, frame)
    grouped = scaled.astype(jnp.float32).reshape(*layer.lengths.shape, -1, q.shape[-1])

    def dot(part: Array, pool: Array) -> Array:
        return jnp.einsum(
            "bkgh,bkmh->bkgm", part, _by_head(pool, layer), precision=jax.lax.Precision.HIGHEST
        )

    first_slots = jnp.arange(layer.num_pages, dtype=jnp.int32) * layer.page_size
    low, high = bounds.values()
    reach = slack * jnp.abs(grouped)
    # with slack 1, (q ± slack · |q|) / 2 are the positive and negative parts of q
    scores = dot((grouped + reach) / 2, high) + dot((grouped - reach) / 2, low)
    if frame is not None:
        terms = span_terms(q, frame).reshape(*scores.shape[:3], -1)
        scores += terms[..., first_slots // SPAN]
    used = first_slots < layer.lengths[..., None]
    return jnp.where(used, sm_scale * jnp.max(scores, axis=2), -jnp.inf)


def mean_queries(q: Float[Array, "B N H"], kv_heads: int) -> Float[Array, "B K H"]:
    """Returns the mean query of every group, in q's dtype."""
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])
    share = 1 / grouped.shape[2]
    return (jnp.sum(grouped, axis=2, dtype=jnp.float32) * share).astype(q.dtype)


def _by_head(pool: Float[Array, "pages H"], layer: LayerCache) -> Float32[Array, "B K M H"]:
    """Reads each logical page of each head from a pool; a reshape under the identity table."""
    shape = (*layer.lengths.shape, layer.num_pages, pool.shape[-1])
    return (
        (pool if layer.block_table is None else pool[layer.block_table])
        .reshape(shape)
        .astype(jnp.float32)
    )
