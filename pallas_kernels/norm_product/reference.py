"""Implements `api.norm_product` in plain jnp, for any number of rows."""

from jaxtyping import Array, Float

from jsparse.heads import rms_norm
from jsparse.pallas_kernels.linear import Matrix, plain_product


def norm_product(
    x: Float[Array, "*batch in"],
    delta: Float[Array, "*batch in"],
    scale: Float[Array, "in"],
    matrix: Matrix,
    bias: Float[Array, "out"] | None = None,
    *,
    eps: float,
) -> tuple[Float[Array, "*batch in"], Float[Array, "*batch out"]]:
    """Implements `api.norm_product` in plain jnp."""
    total = x + delta
    return total, plain_product(rms_norm(total, scale, eps=eps), matrix, bias)
