"""Combines what the devices of one model have computed, each for some of its heads.

A model that is spread over devices (tensor parallel) runs one program on all of them, in which each
device, a *rank*, sees a smaller model: its own heads, and its own part of the MLP. There these
functions combine what the ranks have; where a model has one device they return what they get.
"""

from typing import Literal

import jax
from jaxtyping import Array, Shaped

AXIS = "ranks"


def count() -> int:
    """Returns the number of ranks that the program being traced runs on."""
    return jax.lax.axis_size(AXIS) if _spread() else 1


def across(x: Shaped[Array, "..."], how: Literal["sum", "mean", "max"]) -> Shaped[Array, "..."]:
    """Returns the sum, the mean or the greatest of what the ranks have, the same on all of them."""
    if not _spread():
        return x
    return {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}[how](x, AXIS)


def gathered(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Returns what the ranks have behind one another, the same on all of them."""
    return jax.lax.all_gather(x, AXIS, axis=axis % x.ndim, tiled=True) if _spread() else x


def own_part(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Returns this rank's part of an array that all ranks have."""
    if not _spread():
        return x
    size = x.shape[axis] // count()
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, axis)


def _spread() -> bool:
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes
