"""Implements `api.skinny_product` in plain jnp, for any number of rows."""

from jaxtyping import Array, Float


def skinny_product(
    x: Float[Array, "*batch in"],
    matrix: Float[Array, "in out"],
    bias: Float[Array, "out"] | None = None,
) -> Float[Array, "*batch out"]:
    """Implements `api.skinny_product` in plain jnp."""
    y = x @ matrix
    return y if bias is None else y + bias
