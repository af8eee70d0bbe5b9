"""Implements `api.residual_norm` in plain jnp."""

from jaxtyping import Array, Float

from jsparse.heads import rms_norm


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
