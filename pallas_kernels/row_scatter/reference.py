"""Implements `api.row_scatter` in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def row_scatter(
    pool: Shaped[Array, "rows *W"], ids: Int32[Array, "*lists"], rows: Shaped[Array, "*gathered"]
) -> Shaped[Array, "rows *W"]:
    """Implements `api.row_scatter` in plain jnp."""
    # a negative index would count from the end
    at = jnp.where(ids < 0, pool.shape[0], ids)
    return pool.at[at].set(rows, mode="drop")
