"""Implements `api.norm_product` in plain jnp, for any number of rows."""

from jaxtyping import Array, Float

from jsparse.heads import rms_norm


def norm_product(
    x: Float[Array, "*batch in"],
    delta: Float[Array, "*batch in"],
    scale: Float[Array, "in"],
    matrix: Float[Array, "in out"],
    bias: Float[Array, "out"] | None = None,
    *,
    eps: float,
) -> tuple[Float[Array, "*batch in"], Float[Array, "*batch out"]]:
    """Implements `api.norm_product` in plain jnp."""
    total = x + delta
    y = rms_norm(total, scale, eps=eps) @ matrix
    return total, y if bias is None else y + bias
