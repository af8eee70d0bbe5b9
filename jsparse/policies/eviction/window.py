"""Measures how the newest queries weigh the slots of a cache, in blocks of slots.

No more than a block of logits ever exists, whatever the prompt's length; what fits in one block is
computed once, anything longer twice: for its logsumexp, then for the weights.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jsparse.cache import LayerCache, read_heads, read_pages
from jsparse.shapes import Rows

Group = Literal["mean", "max"]
BLOCK_BYTES = 2**29  # of one block of logits, in float32


def as_ring(window: Float[Array, "B W N H"], positions: Rows) -> Float[Array, "B W N H"]:
    """Turn a window that ends with the newest query into a ring: position p at p % W."""
    size = window.shape[1]
    at = (jnp.arange(size, dtype=jnp.int32) - positions[:, None]) % size
    return jnp.take_along_axis(window, at[:, :, None, None], axis=1)


def asked(ring: Float[Array, "B W N H"], positions: Rows) -> Bool[Array, "B W"]:
    """Mark the queries of a ring that there have been, in rows of `positions` tokens."""
    return jnp.arange(ring.shape[1], dtype=jnp.int32) < positions[:, None]


def mean_query(
    ring: Float[Array, "B W N H"], positions: Rows, kv_heads: int
) -> Float32[Array, "B K H"]:
    """Return the mean of a window's queries, over the window and over each KV head's group."""
    batch, _, heads, head_dim = ring.shape
    there = asked(ring, positions)[:, :, None, None]
    total = jnp.sum(jnp.where(there, ring.astype(jnp.float32), 0.0), axis=1)
    total = jnp.sum(total.reshape(batch, kv_heads, heads // kv_heads, head_dim), axis=2)
    count = jnp.clip(positions, 1, ring.shape[1]) * (heads // kv_heads)
    return total / count[:, None, None]


def window_attention(
    ring: Float[Array, "B W N H"],
    positions: Rows,
    held: LayerCache,
    competing: Bool[Array, "B K S"],
    *,
    group: Group = "mean",
) -> Float32[Array, "B K S"]:
    """Return each competing slot's mean share of the window's attention; 0 for the others.

    The shares are of the competing slots alone, which all queries of the window come after. With
    group="mean" every query head has a softmax of its own, and the mean is over the window and the
    group; with "max" the group has one softmax per query, of its largest logits.

    Args:
        ring: the newest queries, after RoPE; position p lies at p % W.
        positions: the number of tokens so far of each row.
        held: the layer's K, and the bias of slots that have one.
        competing: the slots to be measured.
        group: the way in which a group's heads are made one.
    """
    batch, kv_heads = held.lengths.shape
    size, heads, head_dim = ring.shape[1:]
    queries = ring.reshape(batch, size, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    there = asked(ring, positions)[:, None]  # [B, 1, W]
    if group == "mean":
        there = jnp.repeat(there, heads // kv_heads, axis=1).reshape(batch, 1, -1)

    def logits(rows: Array, bias: Array | None, seen: Array) -> Float32[Array, "B K rows n"]:
        found = head_dim**-0.5 * jnp.einsum(
            "bkgwh,bksh->bkgws",
            queries,
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

    def share(logits: Array, lse: Array) -> Float32[Array, "B K count"]:
        weights = jnp.exp(logits - lse[..., None])
        weights = jnp.where(there[..., None] & jnp.isfinite(logits), weights, 0.0)
        return jnp.sum(weights, axis=2) / jnp.maximum(jnp.sum(there, -1), 1)[..., None]

    pages = max(BLOCK_BYTES // (4 * batch * heads * size * held.page_size), 1)
    if pages >= held.num_pages:
        bias = None if held.bias is None else read_heads(held.bias, held)
        whole = logits(read_heads(held.k, held), bias, competing)
        return share(whole, jax.nn.logsumexp(whole, axis=-1))

    def block(first: Array) -> Float32[Array, "B K rows n"]:
        page = first + jnp.arange(pages, dtype=jnp.int32)
        logical = jnp.minimum(page, held.num_pages - 1)  # past the last it is read again, unseen
        logical = jnp.broadcast_to(logical, (batch, kv_heads, pages))
        bias = None if held.bias is None else _flat(read_pages(held.bias, held, logical))
        paged = competing.reshape(batch, kv_heads, held.num_pages, held.page_size)
        seen = jnp.take(paged, page, axis=2, mode="fill", fill_value=False)
        return logits(_flat(read_pages(held.k, held, logical)), bias, _flat(seen))

    firsts = jnp.arange(0, held.num_pages, pages, dtype=jnp.int32)
    lse = jax.lax.map(lambda first: jax.nn.logsumexp(block(first), axis=-1), firsts)
    lse = jax.nn.logsumexp(lse, axis=0)
    shares = jnp.moveaxis(jax.lax.map(lambda first: share(block(first), lse), firsts), 0, 2)
    return shares.reshape(batch, kv_heads, -1)[..., : held.capacity]


def _flat(pages: Array) -> Array:
    """Join the pages [B, K, n, P, …] of each head to slots [B, K, n · P, …]."""
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])


def pooled(
    scores: Float32[Array, "B K S"],
    competing: Bool[Array, "B K S"],
    width: int,
    pooling: Literal["mean", "max"],
) -> Float32[Array, "B K S"]:
    """Replace each score by the mean or the largest of `width` neighbours, itself in the middle.

    Slots that do not compete count as 0, as padding does in SnapKV's code.
    """
    if width == 1:
        return scores
    kind, start = (jax.lax.max, -jnp.inf) if pooling == "max" else (jax.lax.add, 0.0)
    scores = jnp.where(competing, scores, 0.0)
    side = width // 2
    padding = ((0, 0), (0, 0), (side, side))
    found = jax.lax.reduce_window(scores, start, kind, (1, 1, width), (1, 1, 1), padding)
    return found / width if pooling == "mean" else found
