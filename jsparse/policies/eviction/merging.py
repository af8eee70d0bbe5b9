"""Merges dropped slots into one, by a softmax that preserves their logsumexp.

Rows (k_j, v_j, b_j) become one row for a query q̂ that represents future queries: with s_j =
q̂·k_j/√H + b_j and α = softmax(s) it is K' = Σ α_j k_j, V' = Σ α_j v_j and b' = logsumexp(s) -
q̂·K'/√H. At q̂ its logit is the logsumexp of the rows' logits; for every other query it is at most
that (Gibbs' inequality). Source: HARD-KV (LSE-preserving merge).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jsparse.cache import LayerCache, physical_pages, read_heads
from jsparse.shapes import HeadFlags


class MergedSlot(NamedTuple):
    """The merged row of each head, in K's and V's type, and its bias."""

    k: Float[Array, "B K H"]
    v: Float[Array, "B K H"]
    bias: Float32[Array, "B K"]


def merged_slot(
    kv: LayerCache, slots: Bool[Array, "B K S"], query: Float32[Array, "B K H"]
) -> MergedSlot:
    """Merges the marked slots of each head; at least one must be marked."""
    # elementwise products and sums: a matrix product would round the weights to K's type
    k, v = (read_heads(pool, kv).astype(jnp.float32) for pool in (kv.k, kv.v))
    scale = k.shape[-1] ** -0.5
    logits = scale * jnp.sum(k * query[:, :, None], axis=-1)
    if kv.bias is not None:
        logits += read_heads(kv.bias, kv)
    logits = jnp.where(slots, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.where(slots, jnp.exp(logits - lse[..., None]), 0.0)
    mean_k, mean_v = (jnp.sum(weights[..., None] * rows, axis=2) for rows in (k, v))
    mean_k = mean_k.astype(kv.k.dtype)
    # from the rounded key, so that the logit at the query is exact
    at_query = scale * jnp.sum(mean_k.astype(jnp.float32) * query, axis=-1)
    return MergedSlot(mean_k, mean_v.astype(kv.v.dtype), lse - at_query)


def put_slot(layer: LayerCache, slot: int, merged: MergedSlot, where: HeadFlags) -> LayerCache:
    """Writes a merged row into one slot of the marked heads."""
    logical = jnp.full((*layer.lengths.shape, 1), slot // layer.page_size, jnp.int32)
    page = jnp.where(where, physical_pages(layer, logical)[..., 0], layer.k.shape[0])

    def put(pool: Array, rows: Array) -> Array:
        return pool.at[page, slot % layer.page_size].set(rows.astype(pool.dtype), mode="drop")

    assert layer.bias is not None
    k, v = layer.arrays
    return layer._replace(k=put(k, merged.k), v=put(v, merged.v), bias=put(layer.bias, merged.bias))
