"""Sums products that kernels left in parts.

A matrix with few columns does not keep a GPU busy. Its rows are then cut into parts, each
multiplied by its own thread blocks, and the partial products must be summed. That takes a launch,
unless the consumer of the product does it: products of a decode step may be passed to it in parts,
in float32, with a leading axis.
"""

from functools import reduce
from operator import add

import jax.numpy as jnp
from jaxtyping import Array, Float


def check_parts(name: str, x: Float[Array, "*parts_and_shape"], ndim: int) -> None:
    """Raises ValueError unless `x` has `ndim` axes, or one more for float32 parts."""
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
    """Returns x, or the sum over its first axis if it has one more than `ndim`.

    The sum is computed in float32 and rounded to `dtype`. Parts are added one by one, in order: the
    order of XLA's own sum can depend on the sizes.
    """
    if x.ndim == ndim:
        return x.astype(dtype)
    return reduce(add, (part.astype(jnp.float32) for part in x)).astype(dtype)
