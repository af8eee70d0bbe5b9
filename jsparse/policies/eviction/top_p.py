"""Marks the slots in the top-p of any query of a window, as in HARD-KV's public code.

Source: HARDInfer, the code of "HARD-KV: Head-Adaptive Regularization for Decoding-time KV
Compression": every query of the window takes the top-p of its softmax over all slots of its head,
and the head keeps their union.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import read_heads
from jsparse.policies.eviction.budgets import MARKED
from jsparse.policies.eviction.settings import LayerView, ScoreFn


def or_in_top_p(score: ScoreFn, p: float) -> ScoreFn:
    """Adds MARKED to the scores of the slots that any query of the window has in its top-p.

    `score` must return shares, which are below MARKED for all other slots.
    """

    def marked(view: LayerView) -> Float32[Array, "B K S"]:
        return score(view) + jnp.where(in_top_p(view, p), MARKED, 0.0)

    return marked


def in_top_p(view: LayerView, p: float) -> Bool[Array, "B K S"]:
    """Marks each slot in the top-p of a query of the window, for each query head of the group.

    A query's softmax is over all slots up to its own token, including sinks and the merged slot.
    """
    kv, size = view.kv, view.ring.shape[1]
    batch, kv_heads = kv.lengths.shape
    queries = view.ring.reshape(batch, size, kv_heads, -1, view.ring.shape[-1]).swapaxes(1, 2)
    age = (view.positions[:, None] - 1 - jnp.arange(size, dtype=jnp.int32)) % size  # [B, W]
    stored = jnp.arange(size, dtype=jnp.int32) < view.positions[:, None]
    reach = jnp.where(stored[:, None], kv.lengths[..., None] - age[:, None], 0)  # [B, K, W]
    keys = read_heads(kv.k, kv)
    bias = jnp.zeros(keys.shape[:3]) if kv.bias is None else read_heads(kv.bias, kv)

    def of_head(given: tuple[Array, Array, Array, Array]) -> Bool[Array, "S"]:
        return _union(*given, p=p)

    by_head = jax.tree.map(
        lambda x: x.reshape(batch * kv_heads, *x.shape[2:]), (queries, keys, bias, reach)
    )
    return jax.lax.map(of_head, by_head).reshape(*kv.lengths.shape, -1)


def _union(
    queries: Float[Array, "W G H"],
    keys: Float[Array, "S H"],
    bias: Float32[Array, "S"],
    reach: Int32[Array, "W"],
    *,
    p: float,
) -> Bool[Array, "S"]:
    logits = queries.shape[-1] ** -0.5 * jnp.einsum(
        "wgh,sh->wgs",
        queries.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    seen = jnp.arange(keys.shape[0], dtype=jnp.int32) < reach[:, None, None]
    logits = jnp.where(seen, logits + bias, -jnp.inf)
    weights = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0.0)
    best = jnp.sort(weights, axis=-1, descending=True)
    enough = jnp.cumsum(best, axis=-1) >= p * jnp.sum(best, axis=-1, keepdims=True)
    lightest = jnp.take_along_axis(best, jnp.argmax(enough, axis=-1, keepdims=True), axis=-1)
    return jnp.any(seen & (weights >= lightest), axis=(0, 1))
