"""Tests that group_means in triton averages as the reference does."""

from functools import partial

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.group_means import group_means
from tests.kernels.cases.group_means import CASES, Case

pytestmark = pytest.mark.gpu
LARGE = (
    Case("large", batch=1, kv_heads=8, points=3277, max_groups=1639, head_dim=128),
    Case("large_few_groups", batch=1, points=50_000, max_groups=64, head_dim=128),
    Case("large_float32", batch=1, points=13108, max_groups=6554, head_dim=128, dtype="float32"),
)


@partial(jax.jit, static_argnames=("max_groups", "implementation"))
def averaged(*arrays, max_groups, implementation="triton"):
    return group_means(*arrays, max_groups, implementation)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_averages_as_the_reference_does(case, seed):
    inputs, maximum = case.build(seed), case.max_groups
    means, sizes = averaged(*inputs, max_groups=maximum)
    wanted, counted = averaged(*inputs, max_groups=maximum, implementation="reference")
    np.testing.assert_array_equal(sizes, counted)
    if case.like == "whole":
        np.testing.assert_array_equal(means, wanted)
        return
    there = np.arange(case.points) < np.asarray(inputs.number)[:, None]
    points = np.asarray(inputs.points, np.float32)
    largest = np.abs(np.where(there[:, None, :, None], points, 0)).max()
    np.testing.assert_allclose(means, wanted, atol=2e-6 * largest)


def test_a_row_alone_has_the_means_that_it_has_in_a_batch_and_two_runs_agree():
    case = Case("", points=700, dtype="float32", like="spread")
    inputs = case.build()
    together = averaged(*inputs, max_groups=case.max_groups)
    for b in range(case.batch):
        jax.clear_caches()
        alone = averaged(*(x[b : b + 1] for x in inputs), max_groups=case.max_groups)
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_rows[b])
