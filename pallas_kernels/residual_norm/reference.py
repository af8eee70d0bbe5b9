"""Implements `api.residual_norm` in plain jnp."""

from jaxtyping import Array, Float

from jsparse.heads import rms_norm
from jsparse.parts import total


def residual_norm(
    x: Float[Array, "rows D"],
    delta: Float[Array, "rows D"] | Float[Array, "parts rows D"],
    scale: Float[Array, "D"],
    *,
    eps: float,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Implements `api.residual_norm` in plain jnp."""
    x = x + total(delta, x.ndim, x.dtype)
    return x, rms_norm(x, scale, eps=eps)
