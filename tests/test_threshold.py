"""Tests top-k, top-p and compaction against slow numpy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.selection import threshold
from jsparse.selection.threshold import budget_mask, compact, top_k_ids, top_k_mask, top_p_mask
from tests.support.marks import slow_except

SIZE = 12
TINY = float(np.finfo(np.float32).tiny)
top_k = jax.jit(top_k_mask)
top_p = jax.jit(top_p_mask)
budget = jax.jit(budget_mask)
ids_of = jax.jit(top_k_ids, static_argnums=2)
listed = jax.jit(compact, static_argnums=1)

odd = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, TINY, -TINY])
plain = st.floats(width=32, allow_subnormal=False)
few = st.sampled_from([0.25, 0.5, 1.0])
scores_rows = st.lists(
    st.lists(odd | plain | few, min_size=SIZE, max_size=SIZE), min_size=2, max_size=2
)
weight = (
    st.floats(0, 1, width=32, allow_subnormal=False)
    | few
    | st.sampled_from([0.0, TINY, 1e-20, 1e-7])
)
weight_rows = st.lists(st.lists(weight, min_size=SIZE, max_size=SIZE), min_size=2, max_size=2)


def slow_top_k(row: np.ndarray, k: int) -> np.ndarray:
    wanted = [i for i in range(row.size) if not np.isnan(row[i]) and row[i] > -np.inf]
    wanted.sort(key=lambda i: (-row[i], i))  # -0.0 == 0.0, as it should be
    mask = np.zeros(row.size, bool)
    mask[wanted[:k]] = True
    return mask


def slow_budget(row: np.ndarray, sizes: np.ndarray, tokens: int) -> np.ndarray:
    order = np.flatnonzero(slow_top_k(row, row.size))
    order = sorted(order, key=lambda i: (-row[i], i))
    mask, left = np.zeros(row.size, bool), max(tokens, 0)
    for nth, i in enumerate(order):
        left -= int(sizes[i])
        if left < 0 and nth > 0:
            break
        mask[i] = True
    return mask


def slow_compact(row: np.ndarray, capacity: int) -> tuple[list[int], int]:
    ids = [i for i in range(row.size) if row[i]][:capacity]
    return ids + [0] * (capacity - len(ids)), len(ids)


@settings(max_examples=150)
@given(scores_rows, st.lists(st.integers(-1, SIZE + 3), min_size=2, max_size=2))
def test_top_k_is_the_sorted_prefix(rows, k):
    scores = np.array(rows, np.float32)
    expected = np.stack([slow_top_k(row, max(n, 0)) for row, n in zip(scores, k, strict=True)])
    np.testing.assert_array_equal(top_k(scores, np.array(k, np.int32)), expected)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("kinds", [2, 60000])
def test_top_k_ids_are_the_indices_of_the_sorted_prefix(dtype, kinds):
    size = 128
    rng = np.random.default_rng(size + kinds)
    keys = rng.integers(kinds, size=(2, 3, size)).astype(dtype)
    keys *= dtype(np.iinfo(dtype).max // (kinds - 1))  # including the largest key
    k = np.array([[0, 1, size // 3], [size // 2, size - 1, size]], np.int32)
    ids, count = map(np.asarray, ids_of(keys, k, size))
    for at in np.ndindex(k.shape):
        row = keys[at].astype(np.float64)
        mask = slow_top_k(np.where(row == 0, -np.inf, row), k[at])
        assert (list(ids[at]), count[at]) == slow_compact(mask, size)


def test_top_k_supports_one_k_for_all_rows_and_low_precision():
    scores = np.random.default_rng(0).normal(size=(2, 3, 40)).astype(np.float32)
    rounded = scores.astype(jnp.bfloat16)
    got = jax.jit(functools.partial(top_k_mask, k=7))(rounded)
    rounded = rounded.astype(np.float32)
    np.testing.assert_array_equal(got, [[slow_top_k(row, 7) for row in rows] for rows in rounded])


size_rows = st.lists(
    st.lists(st.integers(0, 3) | st.integers(0, 1000), min_size=SIZE, max_size=SIZE),
    min_size=2,
    max_size=2,
)


@settings(max_examples=100)
@given(
    scores_rows
    | st.lists(st.lists(st.integers(-2, 2), min_size=SIZE, max_size=SIZE), min_size=2, max_size=2),
    size_rows,
    st.lists(st.integers(-2, 20) | st.integers(0, 9000), min_size=2, max_size=2),
)
def test_budget_marks_the_sorted_prefix_that_fits(rows, sizes, tokens):
    scores, sizes = np.array(rows, np.float32), np.array(sizes, np.int32)
    expected = [slow_budget(*row) for row in zip(scores, sizes, tokens, strict=True)]
    np.testing.assert_array_equal(budget(scores, sizes, np.array(tokens, np.int32)), expected)


def assert_smallest_set(weights: np.ndarray, p: float, mask: np.ndarray) -> None:
    exact = weights.astype(np.float64)
    slack = 1e-6 * exact.sum()
    chosen = exact[mask]
    if exact.sum() == 0:
        assert not mask.any()
        return
    assert chosen.size
    assert (chosen > 0).all()
    assert chosen.sum() >= p * exact.sum() - slack
    if p >= 1:
        np.testing.assert_array_equal(mask, exact > 0)
    elif chosen.size > 1:
        assert chosen.sum() - chosen.min() < p * exact.sum() + slack
    # the likeliest are chosen, and the first among equals
    order = sorted(range(exact.size), key=lambda i: (-exact[i], i))
    np.testing.assert_array_equal(np.sort(order[: chosen.size]), np.flatnonzero(mask))


@settings(max_examples=150)
@given(
    weight_rows,
    st.lists(
        st.floats(0, 1, width=32) | st.sampled_from([1e-45, 1e-38, 0.5]), min_size=2, max_size=2
    ),
)
def test_top_p_is_the_smallest_set(rows, p):
    weights = np.array(rows, np.float32)
    got = np.asarray(top_p(weights, np.array(p, np.float32)))
    for row, share, mask in zip(weights, p, got, strict=True):
        assert_smallest_set(row, share, mask)


def test_top_p_of_equal_weights_counts_them():
    weights = np.full((1, 8), 0.125, np.float32)  # sums of these are exact
    for p in (0.1, 0.25, 0.5, 0.75, 1.0):
        expected = np.arange(8) < np.ceil(8 * p)
        np.testing.assert_array_equal(top_p(weights, np.float32(p))[0], expected)


def test_top_p_over_many_orders_of_magnitude():
    weights = (10.0 ** -np.arange(36)).astype(np.float32)[None]
    for p, count in ((0.5, 1), (0.95, 2), (0.995, 3), (1.0, 36)):
        assert np.asarray(top_p(weights, np.float32(p)))[0].sum() == count


def test_zero_weights_mark_nothing_and_tiny_p_marks_one():
    weights = np.array([[0, 0, 0, 0], [0, 0.5, 0.25, 0.5]], np.float32)
    for p in (0.0, 1e-45, 1e-38, 1e-9):
        np.testing.assert_array_equal(top_p(weights, np.float32(p)), [[0, 0, 0, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(top_p(weights, np.float32(1.0)), [[0, 0, 0, 0], [0, 1, 1, 1]])


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.booleans(), min_size=SIZE, max_size=SIZE), min_size=3, max_size=3),
    st.integers(0, 2),
)
def test_compact_lists_the_marked(rows, which):
    capacity = (1, 5, SIZE + 2)[which]
    mask = np.array(rows)
    ids, count = listed(mask, capacity)
    for row, got, n in zip(mask, np.asarray(ids), np.asarray(count), strict=True):
        assert (got.tolist(), n) == slow_compact(row, capacity)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", slow_except([np.uint16, np.uint32], np.uint32))
def test_several_bits_per_pass_find_the_same(dtype, many, monkeypatch):
    """As on a GPU."""
    if many:
        monkeypatch.setattr(threshold, "_MANY_ROWS", 5)
    rng = np.random.default_rng(3)
    scores = jnp.asarray(rng.normal(size=(5, 40)).round(1), jnp.float32)
    keys = jnp.asarray(rng.integers(0, 50, (5, 40)), dtype)
    k, p = jnp.arange(5) * 9, jnp.linspace(0, 1, 5)
    weights = jax.nn.softmax(scores)

    def found():
        masks = jax.jit(lambda: (top_k_mask(scores, k), top_p_mask(weights, p)))()
        return jax.device_get((masks, jax.jit(lambda: top_k_ids(keys, k, 40))()))

    bit_by_bit = found()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.tree.map(np.testing.assert_array_equal, found(), bit_by_bit)
