"""Tests nearest_centroid against a loop over points."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels import point_blocks
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from tests.kernels.cases.nearest_centroid import CASES, Case
from tests.support.marks import slow_except_named


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
def test_nearest_match_a_loop(case):
    check(case)


def test_block_size_of_points_changes_nothing(monkeypatch):
    monkeypatch.setattr(point_blocks, "BLOCK_BYTES", 4 * 3 * 2 * 100 * 16)
    assert point_blocks.Blocks.of(200, 3 * 2 * 100).size == 16
    check(CASES[0])


def test_points_and_centroids_must_have_one_dtype():
    inputs = CASES[0].build()
    inputs = inputs._replace(centroid=inputs.centroid.astype(np.float32))
    with pytest.raises(ValueError, match="centroid.dtype=float32: must be that of points"):
        nearest_centroid(*inputs)
