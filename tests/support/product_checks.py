"""Checks the results of products with a matrix."""

from typing import Any

import numpy as np
from jax import numpy as jnp
from jaxtyping import Array


def assert_is_the_product(
    y: Array,
    x: Array | np.ndarray,
    matrix: Array,
    bias: Array | None,
    *,
    roundings: float = 0,
    dtype: Any = None,
) -> None:
    """Asserts y = x · W + b in float64, up to a rounding of each and of a float32 sum.

    If x was computed, its numbers may have been rounded before: `roundings` is the resulting error
    in steps of the dtype, if rounding up and down do not cancel out. `dtype` is that of y, by
    default the matrix's.
    """
    wanted_type = matrix.dtype if dtype is None else dtype
    assert (y.shape, y.dtype) == ((*x.shape[:-1], matrix.shape[1]), wanted_type)
    rows, wide = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    wanted, terms = rows @ wide, np.abs(rows) @ np.abs(wide)
    step = float(jnp.finfo(y.dtype).eps)
    allowed = step * np.abs(wanted) + (2.0**-20 + roundings * step) * terms
    if bias is not None:
        wanted = wanted + np.asarray(bias, np.float64)
        allowed += step * np.abs(wanted)
    assert (np.abs(np.asarray(y, np.float64) - wanted) <= allowed).all()


def assert_is_the_product_of_a_norm(made, given, eps: float, dtype: Any = None) -> None:
    """Asserts that the sum of x and delta was normalised and multiplied, and is returned."""
    (total, y), (x, delta, scale, matrix, bias) = made, given
    assert total.dtype == x.dtype
    if delta.ndim > x.ndim:  # parts
        delta = sum(np.asarray(delta)).astype(x.dtype)
    whole = np.asarray(x, np.float64) + np.asarray(delta, np.float64)
    np.testing.assert_allclose(
        np.asarray(total, np.float64), whole, rtol=float(jnp.finfo(x.dtype).eps)
    )
    norm = np.sqrt(np.mean(whole**2, axis=-1, keepdims=True) + eps)
    normed = whole / norm * np.asarray(scale, np.float64)
    assert_is_the_product(y, normed, matrix, bias, roundings=0.5, dtype=dtype)


def assert_is_the_product_of_a_gate(y, gate_up: Array, matrix: Array, dtype: Any = None) -> None:
    """Asserts that silu(gate) · up was multiplied."""
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=-1)
    gated = gate * up / (1 + np.exp(-np.clip(gate, -700, None)))
    assert_is_the_product(y, gated, matrix, None, roundings=0.5, dtype=dtype)
