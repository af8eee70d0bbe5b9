"""Implements `api.expert_product` in plain jnp; it gathers a matrix for every pair."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32


def expert_product(
    x: Float[Array, "*rows in"],
    matrices: Float[Array, "E in out"],
    chosen: Int32[Array, "k R"],
    weights: Float32[Array, "k R"] | None = None,
    *,
    gated: bool = False,
    dtype: DTypeLike | None = None,
) -> Float[Array, "k R made"]:
    """Implements `api.expert_product` in plain jnp."""
    rows = jnp.broadcast_to(x, (*chosen.shape, x.shape[-1]))
    own = matrices.at[chosen].get(mode="clip")
    y = jnp.einsum("kri,krio->kro", rows, own, preferred_element_type=jnp.float32)
    return finished(y, chosen < len(matrices), weights, gated=gated, dtype=dtype or x.dtype)


def finished(
    sums: Float32[Array, "*pairs out"],
    exists: Array,
    weights: Float32[Array, "*pairs"] | None,
    *,
    gated: bool,
    dtype: DTypeLike,
) -> Float[Array, "*pairs made"]:
    """Applies gate and weight to pairs' sums; pairs without an expert get zeros."""
    if gated:
        gate, up = jnp.split(sums, 2, axis=-1)
        sums = jax.nn.silu(gate) * up
    if weights is not None:
        sums = sums * weights[..., None]
    return jnp.where(exists[..., None], sums, 0).astype(dtype)
