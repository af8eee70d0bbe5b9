"""Tests merge_splits against merging two at a time."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.merge_splits import merge_splits
from jsparse.selection.partials import merge


def partials(pairs=3, splits=5, rows=4, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    lse = rng.normal(size=(pairs, splits, rows)) * 5
    lse[0, 1] = -np.inf
    o = np.where(np.isneginf(lse)[..., None], 0.0, rng.normal(size=(pairs, splits, rows, head_dim)))
    return o.astype(np.float32), lse.astype(np.float32)


merged = jax.jit(merge_splits, static_argnums=3, static_argnames="lse_only")
merge_two = jax.jit(merge)


def test_equals_merging_one_by_one():
    o, lse = partials()
    used = np.array([5, 0, 2])
    got, got_lse = merged(o, lse, np.array([*used, 7]), 3)
    assert (got.shape, got_lse.shape) == ((3, 3, 8), (3, 3))
    got, got_lse = np.asarray(got), np.asarray(got_lse)
    for pair, n in enumerate(used):
        want, want_lse = np.zeros((3, 8), np.float32), np.full(3, -np.inf, np.float32)
        for i in range(n):
            want, want_lse = merge_two(want, want_lse, o[pair, i, :3], lse[pair, i, :3])
        np.testing.assert_allclose(got[pair], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got_lse[pair], want_lse, rtol=1e-6)


def test_unused_splits_may_hold_anything():
    o, lse = partials()
    bad = o.copy(), lse.copy()
    for x in bad:
        x[:, 2:] = np.nan
    used = np.full(3, 2)
    for a, b in zip(merged(*bad, used, 4), merged(o, lse, used, 4), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_may_be_needed_only_for_their_lse():
    o, lse = partials()
    used = np.array([5, 0, 2], np.int32)
    want, want_lse = merged(o, lse, used, 3)
    got, got_lse = merged(o, lse, used, 3, lse_only=1)
    np.testing.assert_array_equal(got, np.asarray(want)[:, 1:])
    np.testing.assert_array_equal(got_lse, want_lse)
    with pytest.raises(ValueError, match="lse_only=3, rows=3: must be .* <= R = 4"):
        merge_splits(o, lse, used, 3, lse_only=3)


def test_wrong_calls_are_refused():
    o, lse = partials()
    with pytest.raises(ValueError, match=r"used.shape=\(2,\): must have an entry"):
        merge_splits(o, lse, np.ones(2, np.int32), 1)
    with pytest.raises(ValueError, match="rows=9: must be .* <= R = 4"):
        merge_splits(o, lse, np.ones(3, np.int32), 9)
