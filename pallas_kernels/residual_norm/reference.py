"""Implements `api.residual_norm` in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def residual_norm(
    x: Float[Array, "rows D"],
    delta: Float[Array, "rows D"],
    scale: Float[Array, "D"],
    *,
    eps: float,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Implements `api.residual_norm` in plain jnp."""
    x = x + delta
    return x, rms_norm(x, scale, eps=eps)


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, "D"], *, eps: float
) -> Float[Array, "*batch D"]:
    """Normalises rows by the root of their mean square, in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * normed.astype(x.dtype)
