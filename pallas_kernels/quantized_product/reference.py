"""Implements `api.quantized_product` in plain jnp, for very many rows and other devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.pallas_kernels.weight_blocks import Blocks, dequantized


def quantized_product(
    x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any
) -> Float[Array, "rows out"]:
    """Implements `api.quantized_product` in plain jnp."""
    x, matrix = jax.lax.optimization_barrier((x, matrix))
    return jnp.dot(x, dequantized(matrix, x.dtype).T, preferred_element_type=dtype)
