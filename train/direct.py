"""Implements DuoAttention's gates: one learned number α per head, rounded after training.

DuoAttention (Xiao et al., arXiv:2410.10819), section 2.2. α is clipped after each step, not when it
is used: a clip halves the gradient at the bounds, and every gate starts at 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32


def init(shape: tuple[int, ...]) -> Float32[Array, "*gates"]:
    """Makes every head a retrieval head: α = 1."""
    return jnp.ones(shape, jnp.float32)


def project(alpha: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Clips α to [0, 1]."""
    return jnp.clip(alpha, 0.0, 1.0)


def sample(
    alpha: Float32[Array, "*gates"], u: Float32[Array, "*gates"]
) -> Float32[Array, "*gates"]:
    """Returns α, ignoring the noise."""
    del u
    return alpha


def mean(alpha: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Returns α: the gate's mean, its score, and its term of the L1 penalty."""
    return alpha


active = score = mean
