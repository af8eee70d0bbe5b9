"""Tests expert_choice against numpy."""

import numpy as np
import pytest

from jsparse.pallas_kernels.expert_choice import expert_choice
from tests.kernels.cases.expert_choice import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_best_experts_and_their_weights(case):
    (logits,) = case.build()
    chosen, weights = expert_choice(logits, case.k, normalized=case.normalized)
    wide = np.asarray(logits, np.float64)
    order = np.argsort(-wide, axis=1, kind="stable")[:, : case.k]
    shares = np.exp(wide - wide.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    wanted = np.take_along_axis(shares, order, 1)
    if case.normalized:
        wanted /= wanted.sum(1, keepdims=True)
    np.testing.assert_array_equal(chosen.T, order)
    np.testing.assert_allclose(weights.T, wanted, rtol=1e-5, atol=1e-30)


def test_number_of_experts_is_checked():
    (logits,) = CASES[0].build()
    for k in (0, 13):
        with pytest.raises(ValueError, match=f"k={k}: must be from 1 to 12"):
            expert_choice(logits, k, normalized=True)
