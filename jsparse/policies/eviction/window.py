"""Stores the newest queries in a ring, and smooths their scores of a cache's slots."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jsparse.shapes import Rows


def as_ring(window: Float[Array, "B W N H"], positions: Rows) -> Float[Array, "B W N H"]:
    """Turns a window that ends with the newest query into a ring: position p at p % W."""
    size = window.shape[1]
    at = (jnp.arange(size, dtype=jnp.int32) - positions[:, None]) % size
    return jnp.take_along_axis(window, at[:, :, None, None], axis=1)


def mean_query(
    ring: Float[Array, "B W N H"], positions: Rows, kv_heads: int
) -> Float32[Array, "B K H"]:
    """Returns the mean of a window's queries, over the window and over each KV head's group."""
    batch, _, heads, head_dim = ring.shape
    stored = (jnp.arange(ring.shape[1], dtype=jnp.int32) < positions[:, None])[..., None, None]
    total = jnp.sum(jnp.where(stored, ring.astype(jnp.float32), 0.0), axis=1)
    total = jnp.sum(total.reshape(batch, kv_heads, heads // kv_heads, head_dim), axis=2)
    count = jnp.clip(positions, 1, ring.shape[1]) * (heads // kv_heads)
    return total / count[:, None, None]


def pooled(
    scores: Float32[Array, "B K S"],
    competing: Bool[Array, "B K S"],
    width: int,
    pooling: Literal["mean", "max"],
) -> Float32[Array, "B K S"]:
    """Replaces each score by the mean or maximum of `width` neighbours centred on it.

    Slots that do not compete count as 0, like padding in SnapKV's code.
    """
    if width == 1:
        return scores
    kind, start = (jax.lax.max, -jnp.inf) if pooling == "max" else (jax.lax.add, 0.0)
    scores = jnp.where(competing, scores, 0.0)
    side = width // 2
    padding = ((0, 0), (0, 0), (side, side))
    found = jax.lax.reduce_window(scores, start, kind, (1, 1, width), (1, 1, 1), padding)
    return found / width if pooling == "mean" else found
