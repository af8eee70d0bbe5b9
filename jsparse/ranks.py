"""Combines the results of one model's devices, each computed for some of its heads.

A model that is spread over devices (tensor parallelism) runs one program on all of them. In it each
device, a *rank*, sees a smaller model: its own heads and its own part of the MLP. These functions
combine the ranks' values; on a single device they return their argument.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

AXIS = "ranks"


def count() -> int:
    """Returns the number of ranks that the program being traced runs on."""
    return jax.lax.axis_size(AXIS) if _spread() else 1


def rank() -> Int32[Array, ""]:
    """Returns the number of this rank, from 0."""
    return jax.lax.axis_index(AXIS) if _spread() else jnp.int32(0)


def across(x: Shaped[Array, "..."], how: Literal["sum", "mean", "max"]) -> Shaped[Array, "..."]:
    """Returns the sum, mean or maximum of the ranks' values, the same on all ranks."""
    if not _spread():
        return x
    return {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}[how](x, AXIS)


def gathered(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Returns the ranks' values concatenated along an axis, the same on all ranks."""
    return jax.lax.all_gather(x, AXIS, axis=axis % x.ndim, tiled=True) if _spread() else x


def own_part(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Returns this rank's part of an array that all ranks hold."""
    if not _spread():
        return x
    size = x.shape[axis] // count()
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, axis)


def _spread() -> bool:
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes
