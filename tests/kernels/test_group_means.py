"""Tests group_means against a loop over groups."""

from functools import partial

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels import point_blocks
from jsparse.pallas_kernels.group_means import group_means
from tests.kernels.cases.group_means import CASES, Case
from tests.support.marks import slow_except_named


def check(case: Case, seed: int = 0) -> None:
    inputs = case.build(seed)
    means, sizes = jax.jit(partial(group_means, max_groups=case.max_groups))(*inputs)
    assert (means.dtype, sizes.dtype) == (np.float32, np.int32)
    means, sizes = np.asarray(means), np.asarray(sizes)
    points, of_point = np.asarray(inputs.points, np.float64), np.asarray(inputs.of_point)
    numbers = np.asarray(inputs.number)
    for b, k in np.ndindex(*sizes.shape[:2]):
        number = numbers[b]
        for group in range(case.max_groups):
            members = points[b, k, :number][of_point[b, k, :number] == group]
            assert sizes[b, k, group] == len(members)
            wanted = members.mean(0) if len(members) else np.zeros(case.head_dim)
            scale = np.abs(members).max(initial=1.0)
            np.testing.assert_allclose(means[b, k, group], wanted, atol=1e-6 * scale)


@pytest.mark.parametrize("case", slow_except_named(CASES, "any", "spread", "odd"), ids=str)
def test_means_match_a_loop(case):
    check(case)


def test_block_size_of_points_changes_nothing(monkeypatch):
    monkeypatch.setattr(point_blocks, "BLOCK_BYTES", 4 * 3 * 2 * 100 * 16)
    assert point_blocks.Blocks.of(200, 3 * 2 * 100).size == 16
    check(CASES[0], 1)


def test_zero_groups_are_refused():
    with pytest.raises(ValueError, match="max_groups=0: must be an integer of at least 1"):
        group_means(*CASES[0].build(), max_groups=0)
