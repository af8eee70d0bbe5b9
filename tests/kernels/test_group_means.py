"""Tests group_means against a loop over groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import every_other

from jsparse.pallas_kernels import point_blocks
from jsparse.pallas_kernels.group_means import group_means
from jsparse.pallas_kernels.group_means.cases import CASES, Case


def check(case: Case, seed: int = 0) -> None:
    inputs = case.build(seed)
    means, sizes = jax.jit(partial(group_means, most_groups=case.most_groups))(*inputs)
    assert (means.dtype, sizes.dtype) == (jnp.float32, jnp.int32)
    points = np.asarray(inputs.points, np.float64)
    for b, k in np.ndindex(*sizes.shape[:2]):
        number = int(inputs.number[b])
        for group in range(case.most_groups):
            members = points[b, k, :number][np.asarray(inputs.of_point[b, k, :number]) == group]
            assert sizes[b, k, group] == len(members)
            wanted = members.mean(0) if len(members) else np.zeros(case.head_dim)
            scale = np.abs(members).max(initial=1.0)
            np.testing.assert_allclose(means[b, k, group], wanted, atol=1e-6 * scale)


@pytest.mark.parametrize("case", every_other(CASES), ids=lambda case: case.name)
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
        assert inputs.points.shape == (case.batch, case.kv_heads, case.points, case.head_dim)
        if case.used == "any":
            assert {0, case.points} <= set(inputs.number.tolist())
            assert {1, case.most_groups} <= set(inputs.groups.tolist())
        there = jnp.arange(case.points) < inputs.number[:, None]
        largest = jnp.max(jnp.where(there[:, None], inputs.of_point, 0), axis=(1, 2))
        assert (largest < inputs.groups).all()


INPUTS = CASES[0].build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": INPUTS.points[0]}, r"points.shape=\(2, 200, 32\): must be \[B, K, C, H\]"),
        ({"points": INPUTS.points.astype(jnp.int32)}, "points.dtype=int32: must be a float type"),
        (
            {"of_point": INPUTS.of_point[..., :9]},
            r"of_point: must be int32 \[3, 2, 200\], not int32 \[3, 2, 9\]",
        ),
        ({"of_point": INPUTS.of_point * 1.0}, r"of_point: must be int32 .*, not float32"),
        ({"number": INPUTS.number[:2]}, r"number: must be int32 \[3\], not int32 \[2\]"),
        ({"groups": INPUTS.groups * 1.0}, r"groups: must be int32 \[3\], not float32 \[3\]"),
        ({"most_groups": 0}, "most_groups=0: must be an integer of at least 1"),
        ({"implementation": "abacus"}, "implementation='abacus': group_means has"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        group_means(**{**INPUTS._asdict(), "most_groups": 100, **change})
