"""Implements `api.merge_splits` in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32


def merge_splits(
    o: Float32[Array, "pairs splits R H"],
    lse: Float32[Array, "pairs splits R"],
    used: Int32[Array, "at_least_pairs"],
    rows: int,
    *,
    lse_only: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "pairs {rows-lse_only} H"], Float32[Array, "pairs {rows}"]]:
    """Implements `api.merge_splits` in plain jnp."""
    counts = (jnp.arange(o.shape[1]) < used[: o.shape[0], None])[..., None]
    lse = jnp.where(counts, lse[:, :, :rows], -jnp.inf)
    top = jnp.max(lse, axis=1)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lse - top[:, None])
    total = jnp.sum(weights, axis=1)
    parts = jnp.where(counts[..., None], o[:, :, :rows], 0.0)
    merged = (
        jnp.sum(weights[..., None] * parts, axis=1) / jnp.where(total == 0, 1.0, total)[..., None]
    )
    return merged[:, lse_only:].astype(dtype), jnp.log(total) + top
