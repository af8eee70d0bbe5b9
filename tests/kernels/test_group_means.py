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
def test_averages_as_a_loop_does(case):
    check(case)


def test_blocks_of_points_change_nothing(monkeypatch):
    monkeypatch.setattr(point_blocks, "BLOCK_BYTES", 4 * 3 * 2 * 100 * 16)
    assert point_blocks.Blocks.of(200, 3 * 2 * 100).size == 16
    check(CASES[0], 1)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        inputs = case.build(3)
        of_point, number = np.asarray(inputs.of_point), np.asarray(inputs.number)
        assert inputs.points.shape == (case.batch, case.kv_heads, case.points, case.head_dim)
        if case.used == "any":
            assert {0, case.points} <= set(inputs.number.tolist())
            assert {1, case.max_groups} <= set(inputs.groups.tolist())
        there = np.arange(case.points) < number[:, None]
        largest = np.where(there[:, None], of_point, 0).max((1, 2))
        assert (largest < np.asarray(inputs.groups)).all()


INPUTS = CASES[0].build()
POINTS, OF_POINT, NUMBER, GROUPS = (np.asarray(x) for x in INPUTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"points": jax.device_put(POINTS[0])},
            r"points=bfloat16\[2, 200, 32\]: must be float\[",
        ),
        (
            {"points": jax.device_put(POINTS.astype(np.int32))},
            r"points=int32\[3, 2, 200, 32\]: must be float\[",
        ),
        (
            {"of_point": jax.device_put(OF_POINT[..., :9])},
            r"of_point=int32\[3, 2, 9\]: must be int32\[",
        ),
        (
            {"of_point": jax.device_put(OF_POINT * 1.0)},
            r"of_point=float32\[3, 2, 200\]: must be int32\[",
        ),
        ({"number": jax.device_put(NUMBER[:2])}, r"number=int32\[2\]: must be int32\["),
        (
            {"groups": jax.device_put(GROUPS * 1.0)},
            r"groups=float32\[3\]: must be int32\[",
        ),
        ({"max_groups": 0}, "max_groups=0: must be an integer of at least 1"),
        ({"implementation": "abacus"}, "implementation='abacus': group_means has"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        group_means(**{**INPUTS._asdict(), "max_groups": 100, **change})
