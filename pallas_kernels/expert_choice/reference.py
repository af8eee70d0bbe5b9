"""Implements `api.expert_choice` in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def expert_choice(
    logits: Float32[Array, "R E"], k: int, *, normalized: bool
) -> tuple[Int32[Array, "k R"], Float32[Array, "k R"]]:
    """Implements `api.expert_choice` in plain jnp."""
    _, chosen = jax.lax.top_k(logits, k)
    best = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
    if normalized:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    return chosen.T.astype(jnp.int32), best.T
