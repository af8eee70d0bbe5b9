"""Implements `api.norm_product` in plain jnp, for any number of rows."""

from jaxtyping import Array, Float

from jsparse.heads import rms_norm
from jsparse.pallas_kernels.linear.api import Matrix, plain_product
from jsparse.parts import total


def norm_product(
    x: Float[Array, "*batch in"],
    delta: Float[Array, "*parts_and_batch in"],
    scale: Float[Array, "in"],
    matrix: Matrix,
    bias: Float[Array, "out"] | None = None,
    *,
    eps: float,
) -> tuple[Float[Array, "*batch in"], Float[Array, "*batch out"]]:
    """Implements `api.norm_product` in plain jnp."""
    whole = x + total(delta, x.ndim, x.dtype)
    return whole, plain_product(rms_norm(whole, scale, eps=eps), matrix, bias)
