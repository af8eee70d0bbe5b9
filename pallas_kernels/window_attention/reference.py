"""Implements `api.window_attention` in plain jnp, in blocks of pages.

No more than a block of logits ever exists. What fits in one block is computed once, anything longer
twice: for its logsumexps, then for the shares.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jsparse.cache import LayerCache, read_heads, read_pages
from jsparse.shapes import Rows

BLOCK_BYTES = 2**28  # of one block of logits


def window_attention(
    queries: Float[Array, "B W N H"],
    positions: Rows,
    layer: LayerCache,
    competing: Bool[Array, "B K S"],
    *,
    group: str,
) -> Float32[Array, "B K S"]:
    """Implement `api.window_attention` in plain jnp."""
    batch, kv_heads = layer.lengths.shape
    size, heads, head_dim = queries.shape[1:]
    grouped = queries.reshape(batch, size, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    asked = (jnp.arange(size, dtype=jnp.int32) < positions[:, None])[:, None]  # [B, 1, W]
    if group == "mean":
        asked = jnp.tile(asked, (1, 1, heads // kv_heads))

    def logits(rows: Array, bias: Array | None, seen: Array) -> Float32[Array, "B K rows n"]:
        found = head_dim**-0.5 * jnp.einsum(
            "bkgwh,bksh->bkgws",
            grouped,
            rows.astype(queries.dtype),
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None,
        )
        if bias is not None:
            found += bias[:, :, None, None]
        found = jnp.where(seen[:, :, None, None], found, -jnp.inf)
        if group == "max":
            return jnp.max(found, axis=2)
        return found.reshape(batch, kv_heads, -1, found.shape[-1])

    def shares(logits: Array, lse: Array) -> Float32[Array, "B K n"]:
        weights = jnp.where(jnp.isfinite(logits), jnp.exp(logits - lse[..., None]), 0.0)
        weights = jnp.where(asked[..., None], weights, 0.0)
        return jnp.sum(weights, axis=2) / jnp.maximum(jnp.sum(asked, -1), 1)[..., None]

    pages = max(BLOCK_BYTES // (4 * batch * heads * size * layer.page_size), 1)
    if pages >= layer.num_pages:
        bias = None if layer.bias is None else read_heads(layer.bias, layer)
        whole = logits(read_heads(layer.k, layer), bias, competing)
        return shares(whole, jax.nn.logsumexp(whole, axis=-1))

    def block(first: Array) -> Float32[Array, "B K rows n"]:
        page = first + jnp.arange(pages, dtype=jnp.int32)
        logical = jnp.minimum(page, layer.num_pages - 1)  # past the last it is read again, unseen
        logical = jnp.broadcast_to(logical, (batch, kv_heads, pages))
        bias = None if layer.bias is None else _flat(read_pages(layer.bias, layer, logical))
        paged = competing.reshape(batch, kv_heads, layer.num_pages, layer.page_size)
        seen = jnp.take(paged, page, axis=2, mode="fill", fill_value=False)
        return logits(_flat(read_pages(layer.k, layer, logical)), bias, _flat(seen))

    firsts = jnp.arange(0, layer.num_pages, pages, dtype=jnp.int32)
    lse = jax.lax.map(lambda first: jax.nn.logsumexp(block(first), axis=-1), firsts)
    lse = jax.nn.logsumexp(lse, axis=0)
    found = jnp.moveaxis(jax.lax.map(lambda first: shares(block(first), lse), firsts), 0, 2)
    return found.reshape(batch, kv_heads, -1)[..., : layer.capacity]


def _flat(pages: Array) -> Array:
    """Join the pages [B, K, n, P, …] of each head to slots [B, K, n · P, …]."""
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])
