"""Adds up products that were left in parts.

A matrix with few columns does not keep a GPU busy. Its rows are then cut into parts, each
multiplied by programs of its own, and what they give is to be added up. That takes a launch, unless
whatever reads the product does it: products of a decode step may be handed to it in parts, of
float32, with an axis in front.
"""

from functools import reduce
from operator import add

import jax.numpy as jnp
from jaxtyping import Array, Float


def check_parts(name: str, x: Float[Array, "*parts_and_shape"], ndim: int) -> None:
    """Raises a ValueError where argument `name` has neither `ndim` axes nor parts of that."""
    if x.ndim == ndim:
        return
    if x.ndim != ndim + 1 or not len(x) or x.dtype != jnp.float32:
        raise ValueError(
            f"{name}={x.dtype}{list(x.shape)}: must have {ndim} axes, or be one or more parts of "
            f"that, of float32"
        )


def total(
    x: Float[Array, "*parts_and_shape"], ndim: int, dtype: jnp.dtype
) -> Float[Array, "*shape"]:
    """Returns x, or the sum over its first axis where it has one more than `ndim`.

    The sum is float32, and rounded to `dtype`. Parts are added one by one, in their order: in what
    order XLA's own sum adds them can depend on the sizes.
    """
    if x.ndim == ndim:
        return x.astype(dtype)
    return reduce(add, (part.astype(jnp.float32) for part in x)).astype(dtype)
