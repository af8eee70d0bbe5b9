"""Implements `api.gated_product` in plain jnp, for any number of rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.pallas_kernels.linear.api import Matrix, plain_product


def gated(gate_up: Float[Array, "*batch two_in"]) -> Float[Array, "*batch in"]:
    """Returns silu(gate) · up."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def gated_product(
    gate_up: Float[Array, "*batch two_in"], matrix: Matrix, bias: Float[Array, "out"] | None = None
) -> Float[Array, "*batch out"]:
    """Implements `api.gated_product` in plain jnp."""
    return plain_product(gated(gate_up), matrix, bias)
