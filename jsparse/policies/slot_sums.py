"""Sums over the tokens of a head in an order that depends on neither batch nor capacity."""

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

FAN = 16


def slot_sums(x: Float32[Array, "B K S H"]) -> Float32[Array, "B K H"]:
    """Sums over the slots, which must be 0 past a head's tokens."""
    while x.shape[2] > 1:
        # otherwise XLA may recompute the sums' inputs for each member of a run
        x = jax.lax.optimization_barrier(x)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % FAN), (0, 0)))
        batch, heads, slots, head_dim = x.shape
        runs = x.reshape(batch, heads, slots // FAN, FAN, head_dim)
        x = reduce(add, (runs[:, :, :, nth] for nth in range(FAN)))
    return x[:, :, 0]
