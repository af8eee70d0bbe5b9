"""Tests residual_norm against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.residual_norm import residual_norm
from tests.kernels.cases.residual_norm import CASES
from tests.support.marks import slow_except_named

norm = jax.jit(residual_norm, static_argnames=("eps", "implementation"))


@pytest.mark.parametrize("case", slow_except_named(CASES, "few", "loud", "parts"), ids=str)
def test_the_sum_is_normalised(case):
    x, delta, scale = case.build()
    total, normed = norm(x, delta, scale, eps=case.eps)
    assert total.dtype == normed.dtype == x.dtype
    if case.parts is not None:
        delta = sum(np.asarray(delta, np.float32)).astype(x.dtype)
    wide = [np.asarray(each, np.float64) for each in (x, delta, scale)]
    whole = wide[0] + wide[1]
    rounding = float(jnp.finfo(case.dtype).eps)
    np.testing.assert_allclose(np.asarray(total, np.float64), whole, rtol=rounding, atol=1e-12)
    mean = np.mean(whole**2, axis=-1, keepdims=True)
    wanted = whole / np.sqrt(mean + case.eps) * wide[2]
    np.testing.assert_allclose(
        np.asarray(normed, np.float64), wanted, rtol=4 * rounding, atol=4 * rounding
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8), (3, 8), (8,)), r"delta=float32\[3, 8\]: must be float\["),
        (((2, 8), (2, 3, 8), (8,)), r"delta=float32\[2, 3, 8\]: must be float\["),
        (((2, 8), (0, 2, 8), (8,)), r"delta=float32\[0, 2, 8\]: must be as x is"),
        (((8,), (8,), (8,)), r"x=float32\[8\]: must be float\["),
        (((2, 8), (2, 8), (4,)), r"scale=float32\[4\]: must be float\["),
    ],
)
def test_wrong_shapes_are_refused(shapes, message):
    x, delta, scale = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        residual_norm(x, delta, scale, eps=1e-5)
