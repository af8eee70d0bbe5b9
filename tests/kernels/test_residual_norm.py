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
def test_sum_is_normalised(case):
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


def test_zero_parts_are_refused():
    x, scale = jnp.zeros((2, 8)), jnp.zeros(8)
    with pytest.raises(ValueError, match=r"delta=float32\[0, 2, 8\]: must be as x is"):
        residual_norm(x, jnp.zeros((0, 2, 8)), scale, eps=1e-5)
