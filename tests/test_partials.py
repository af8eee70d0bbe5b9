"""Tests merging partials: attention over a union, from attention over its parts."""

import jax
import numpy as np

from jsparse.selection import partials
from jsparse.selection.partials import softmax_partial

merge = jax.jit(partials.merge)

ROWS, SIZE, H = 6, 24, 5


def slow_attention(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes (o, lse) in float64; -inf is not attended."""
    logits, values = logits.astype(np.float64), values.astype(np.float64)
    o, lse = np.zeros((len(logits), values.shape[-1])), np.full(len(logits), -np.inf)
    for i, row in enumerate(logits):
        some = row > -np.inf
        if some.any():
            weights = np.exp(row[some] - row[some].max())
            o[i] = weights @ values[i][some] / weights.sum()
            lse[i] = np.log(weights.sum()) + row[some].max()
    return o, lse


def partial_of(logits, values):
    o, lse = slow_attention(logits, values)
    return o.astype(np.float32), lse.astype(np.float32)


def problem(scale: float):
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, SIZE)) * scale, rng.normal(size=(ROWS, SIZE, H))


def assert_close(got, expected):
    np.testing.assert_allclose(got[0], expected[0], atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6, atol=1e-5)


def test_merge_is_attention_over_the_union():
    for scale in (1.0, 30.0, 1e4):
        logits, values = problem(scale)
        logits = logits.astype(np.float32)
        for cut in (0, 1, 12, SIZE):
            parts = [partial_of(logits[:, a:b], values[:, a:b]) for a, b in ((0, cut), (cut, SIZE))]
            assert_close(merge(*parts[0], *parts[1]), slow_attention(logits, values))


def test_empty_partial_with_any_o_changes_nothing():
    logits, values = problem(1.0)
    o, lse = partial_of(logits, values)
    for junk in (0.0, 1e30, np.nan, np.inf):
        empty = (np.full_like(o, junk), np.full_like(lse, -np.inf))
        for merged in (merge(o, lse, *empty), merge(*empty, o, lse)):
            np.testing.assert_allclose(merged[0], o, rtol=1e-6)
            np.testing.assert_allclose(merged[1], lse, rtol=1e-6)
        both = merge(*empty, *empty)
        np.testing.assert_array_equal(both[0], 0)
        np.testing.assert_array_equal(both[1], -np.inf)


def test_distant_partials_do_not_overflow():
    o = np.ones((1, H), np.float32)
    merged = merge(o, np.float32([1e4]), 3 * o, np.float32([-1e4]))
    np.testing.assert_array_equal(merged[0], o)
    np.testing.assert_array_equal(merged[1], 1e4)


def test_softmax_partial():
    logits, values = problem(1e4)
    logits = logits.astype(np.float32)
    logits[0] = -np.inf
    logits[1, ::2] = -np.inf
    weights, total, lse = jax.jit(softmax_partial)(logits)
    expected = slow_attention(logits, values)
    o = np.einsum("rs,rsh->rh", weights, values) / np.where(total == 0, 1, total)[:, None]
    assert_close((o, lse), expected)
    np.testing.assert_array_equal(np.asarray(weights)[logits == -np.inf], 0)


def test_softmax_partial_of_no_slots():
    weights, total, lse = jax.jit(softmax_partial)(np.zeros((2, 0), np.float32))
    assert weights.shape == (2, 0)
    assert (total.tolist(), lse.tolist()) == ([0, 0], [-np.inf, -np.inf])
