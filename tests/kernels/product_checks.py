"""Checks what a product with a matrix returns."""

import numpy as np
from jax import numpy as jnp
from jaxtyping import Array


def assert_is_the_product(y: Array, x: Array, matrix: Array, bias: Array | None) -> None:
    """Asserts y = x · W + b in float64, up to a rounding of each and of a sum in float32."""
    assert (y.shape, y.dtype) == ((*x.shape[:-1], matrix.shape[1]), x.dtype)
    rows, wide = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    wanted, terms = rows @ wide, np.abs(rows) @ np.abs(wide)
    step = float(jnp.finfo(y.dtype).eps)
    allowed = step * np.abs(wanted) + 2.0**-20 * terms
    if bias is not None:
        wanted = wanted + np.asarray(bias, np.float64)
        allowed += step * np.abs(wanted)
    assert (np.abs(np.asarray(y, np.float64) - wanted) <= allowed).all()
