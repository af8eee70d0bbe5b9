"""Tests nearest_centroid against a loop over points."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels import point_blocks
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from tests.kernels.cases.nearest_centroid import CASES, Case
from tests.support.marks import slow_except, slow_except_named


def check(case: Case, seed: int = 0) -> None:
    inputs = case.build(seed)
    got = np.asarray(jax.jit(lambda *arrays: nearest_centroid(*arrays))(*inputs))
    assert got.dtype == np.int32
    inputs = jax.device_get(inputs)
    points, centroid = (np.asarray(x, np.float64) for x in inputs[:2])
    for b, k in np.ndindex(*got.shape[:2]):
        number, groups = int(inputs.number[b]), int(inputs.groups[b])
        assert not got[b, k, number:].any()
        if not groups:
            assert not got[b, k].any()
            continue
        products = points[b, k, :number] @ centroid[b, k, :groups].T
        if case.like == "whole":
            np.testing.assert_array_equal(got[b, k, :number], products.argmax(-1))
        else:
            chosen = np.take_along_axis(products, got[b, k, :number, None], 1)[:, 0]
            np.testing.assert_allclose(chosen, products.max(-1, initial=-1), atol=1e-5)


@pytest.mark.parametrize("case", slow_except_named(CASES, "any", "directions", "odd"), ids=str)
def test_finds_what_a_loop_finds(case):
    check(case)


@pytest.mark.parametrize("seed", slow_except(range(3), 0))
def test_blocks_of_points_change_nothing(seed, monkeypatch):
    monkeypatch.setattr(point_blocks, "BLOCK_BYTES", 4 * 3 * 2 * 100 * 16)
    assert point_blocks.Blocks.of(200, 3 * 2 * 100).size == 16
    check(CASES[0], seed)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        inputs = case.build(3)
        assert inputs.points.shape == (case.batch, case.kv_heads, case.points, case.head_dim)
        if case.used == "any":
            for used, maximum in ((inputs.number, case.points), (inputs.groups, case.groups)):
                assert {0, maximum} <= set(used.tolist())
    points, centroid, *_ = Case("", batch=1, used="all").build()
    products = np.einsum(
        "kmh,klh->kml", *(np.asarray(x, np.float64)[0] for x in (points, centroid))
    )
    assert ((products == products.max(-1, keepdims=True)).sum(-1) > 1).any()


INPUTS = CASES[0].build()
POINTS, CENTROID, NUMBER, GROUPS = (np.asarray(x) for x in INPUTS[:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"points": jax.device_put(POINTS[0])},
            r"points=bfloat16\[2, 200, 32\]: must be float\[",
        ),
        (
            {"points": jax.device_put(POINTS[:, :, :0])},
            r"points=bfloat16\[3, 2, 0, 32\]: must be float\[.*>0",
        ),
        (
            {"centroid": jax.device_put(CENTROID[..., :16])},
            r"centroid=bfloat16\[3, 2, 100, 16\]: must be float\[",
        ),
        (
            {"centroid": jax.device_put(CENTROID[:, :, :0])},
            r"centroid=bfloat16\[3, 2, 0, 32\]: must be float\[.*>0",
        ),
        (
            {"centroid": jax.device_put(CENTROID.astype(np.float32))},
            "centroid.dtype=float32: must be that of points, bfloat16",
        ),
        ({"number": jax.device_put(NUMBER[:2])}, r"number=int32\[2\]: must be int32\["),
        (
            {"groups": jax.device_put(GROUPS * 1.0)},
            r"groups=float32\[3\]: must be int32\[",
        ),
        ({"implementation": "abacus"}, "implementation='abacus': nearest_centroid has"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        nearest_centroid(**{**INPUTS._asdict(), **change})
