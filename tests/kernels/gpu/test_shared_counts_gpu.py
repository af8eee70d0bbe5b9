"""Tests that shared_counts in triton counts exactly as the reference does."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.shared_counts import shared_counts
from tests.kernels.cases.shared_counts import CASES, LARGE

pytestmark = pytest.mark.gpu
run = jax.jit(shared_counts, static_argnames=("min_count", "max_count", "implementation"))
by_kernel = partial(run, implementation="triton")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_counts_as_the_reference(case, seed):
    inputs = case.build(seed)
    want = run(*inputs, **case.bounds, implementation="reference")
    np.testing.assert_array_equal(by_kernel(*inputs, **case.bounds), want)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_any_total(case):
    """Totals from none to more than there are."""
    case = replace(case, batch=100)
    scores, _ = case.build()
    total = np.linspace(-1, case.lists * case.slots + 1, case.batch).astype(np.int32)
    want = run(scores, total, **case.bounds, implementation="reference")
    np.testing.assert_array_equal(by_kernel(scores, total, **case.bounds), want)


def test_twenty_runs_give_the_same():
    case = replace(LARGE[0], batch=64)
    inputs = case.build()
    first = np.asarray(by_kernel(*inputs, **case.bounds))
    for _ in range(19):
        np.testing.assert_array_equal(by_kernel(*inputs, **case.bounds), first)


def test_a_row_is_not_changed_by_the_batch():
    case = replace(LARGE[0], batch=8)
    scores, total = case.build()
    together = by_kernel(scores, total, **case.bounds)
    for row in (0, 5):
        alone = by_kernel(scores[row : row + 1], total[row : row + 1], **case.bounds)
        np.testing.assert_array_equal(alone[0], together[row])
