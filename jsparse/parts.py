"""Adds up products that were left in parts.

A matrix that is longer than it is wide has too few columns to keep a GPU busy. Its rows are then
cut into parts, each multiplied by programs of its own, and what they give is to be added up. That
takes a launch, unless whoever reads the product does it: products of a decode step may be given to
him in parts, with an axis in front.
"""

from functools import reduce
from operator import add

import jax.numpy as jnp
from jaxtyping import Array, Float


def total(
    x: Float[Array, "*parts_and_shape"], ndim: int, dtype: jnp.dtype
) -> Float[Array, "*shape"]:
    """Returns an array of `ndim` axes, or, of one that has another in front, the sum over that.

    The sum is float32, and rounded to `dtype`. Parts are added one by one, in their order: in what
    order XLA's own sum adds them can depend on the sizes.
    """
    if x.ndim == ndim:
        return x.astype(dtype)
    return reduce(add, (part.astype(jnp.float32) for part in x)).astype(dtype)
