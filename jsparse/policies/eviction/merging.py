"""Merges dropped slots into one, by a softmax that preserves their logsumexp.

Rows (k_j, v_j, b_j) become one row for a query q̂ that represents future queries: with s_j =
q̂·k_j/√H + b_j and α = softmax(s) it is K' = Σ α_j k_j, V' = Σ α_j v_j and b' = logsumexp(s) -
q̂·K'/√H. At q̂ its logit is the logsumexp of the rows' logits; for every other query it is at most
that (Gibbs' inequality). Source: HARD-KV (LSE-preserving merge).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jsparse.cache import LayerCache, placed, read_heads, rounded
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
    mean_k, mean_v = (
        rounded(pool, row[:, :, None])[:, :, 0] for pool, row in ((kv.k, mean_k), (kv.v, mean_v))
    )
    # from the rounded key, so that the logit at the query is exact
    at_query = scale * jnp.sum(mean_k.astype(jnp.float32) * query, axis=-1)
    return MergedSlot(mean_k, mean_v, lse - at_query)


def put_slot(layer: LayerCache, slot: int, merged: MergedSlot, where: HeadFlags) -> LayerCache:
    """Writes a merged row into one slot of the marked heads."""
    slots = jnp.full((*layer.lengths.shape, 1), slot, jnp.int32)

    def put(pool: Any, rows: Array) -> Any:
        return placed(pool, layer, slots, where[..., None], rows[:, :, None])

    assert layer.bias is not None
    return layer._replace(
        k=put(layer.k, merged.k), v=put(layer.v, merged.v), bias=put(layer.bias, merged.bias)
    )
