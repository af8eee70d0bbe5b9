"""Implements `api.window_attention` in plain jnp, in blocks of pages.

Only one block of logits exists at a time. A single block is computed once. With more blocks, each
is computed twice: for the logsumexps, then for the shares.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import LayerCache, read_heads, read_pages
from jsparse.shapes import Rows

BLOCK_BYTES = 2**28  # per block of logits


def window_attention(
    queries: Float[Array, "B W N H"],
    positions: Rows,
    layer: LayerCache,
    competing: Bool[Array, "B K S"],
    *,
    group: str,
    over: str,
) -> Float32[Array, "B K S"]:
    """Implements `api.window_attention` in plain jnp."""
    batch, kv_heads = layer.lengths.shape
    size, heads, head_dim = queries.shape[1:]
    grouped = queries.reshape(batch, size, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    asked = (jnp.arange(size, dtype=jnp.int32) < positions[:, None])[:, None]  # [B, 1, W]
    # the number of slots, from the first on, that each query can see
    reach = layer.lengths[..., None] - _ages(positions, size)[:, None]  # [B, K, W]
    if group == "mean":
        asked = jnp.tile(asked, (1, 1, heads // kv_heads))

    def logits(
        rows: Array, bias: Array | None, slots: Array, contend: Array
    ) -> Float32[Array, "B K rows n"]:
        found = head_dim**-0.5 * jnp.einsum(
            "bkgwh,bksh->bkgws",
            grouped,
            rows.astype(queries.dtype),
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None,
        )
        if bias is not None:
            found += bias[:, :, None, None]
        seen = slots < reach[:, :, None, :, None] if over == "held" else contend[:, :, None, None]
        found = jnp.where(seen, found, -jnp.inf)
        if group == "max":
            return jnp.max(found, axis=2)
        return found.reshape(batch, kv_heads, -1, found.shape[-1])

    def shares(logits: Array, lse: Array, contend: Array) -> Float32[Array, "B K n"]:
        weights = jnp.where(jnp.isfinite(logits), jnp.exp(logits - lse[..., None]), 0.0)
        weights = jnp.where(asked[..., None] & contend[:, :, None], weights, 0.0)
        return jnp.sum(weights, axis=2) / jnp.maximum(jnp.sum(asked, -1), 1)[..., None]

    pages = max(BLOCK_BYTES // (4 * batch * heads * size * layer.page_size), 1)
    if pages >= layer.num_pages:
        bias = None if layer.bias is None else read_heads(layer.bias, layer)
        slots = jnp.arange(layer.capacity, dtype=jnp.int32)
        whole = logits(read_heads(layer.k, layer), bias, slots, competing)
        return shares(whole, jax.nn.logsumexp(whole, axis=-1), competing)

    def block(first: Array) -> tuple[Float32[Array, "B K rows n"], Bool[Array, "B K n"]]:
        page = first + jnp.arange(pages, dtype=jnp.int32)
        # past the last page it is read again, masked
        logical = jnp.minimum(page, layer.num_pages - 1)
        logical = jnp.broadcast_to(logical, (batch, kv_heads, pages))
        bias = None if layer.bias is None else _flat(read_pages(layer.bias, layer, logical))
        paged = competing.reshape(batch, kv_heads, layer.num_pages, layer.page_size)
        contend = _flat(jnp.take(paged, page, axis=2, mode="fill", fill_value=False))
        slots = jnp.arange(pages * layer.page_size, dtype=jnp.int32) + first * layer.page_size
        rows = _flat(read_pages(layer.k, layer, logical))
        return logits(rows, bias, slots, contend), contend

    firsts = jnp.arange(0, layer.num_pages, pages, dtype=jnp.int32)
    lse = jax.lax.map(lambda first: jax.nn.logsumexp(block(first)[0], axis=-1), firsts)
    lse = jax.nn.logsumexp(lse, axis=0)

    def part(first: Array) -> Float32[Array, "B K n"]:
        found, contend = block(first)
        return shares(found, lse, contend)

    found = jnp.moveaxis(jax.lax.map(part, firsts), 0, 2)
    return found.reshape(batch, kv_heads, -1)[..., : layer.capacity]


def _ages(positions: Rows, size: int) -> Int32[Array, "B W"]:
    """Returns the number of tokens after each query of a ring, ignoring missing queries."""
    return (positions[:, None] - 1 - jnp.arange(size, dtype=jnp.int32)) % size


def _flat(pages: Array) -> Array:
    """Joins the pages [B, K, n, P, …] of each head to slots [B, K, n · P, …]."""
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])
