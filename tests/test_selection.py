"""Tests that counting, windows, unions and bits agree with a selection's token mask."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jsparse.selection import (
    Selection,
    everything,
    from_page_mask,
    from_token_mask,
    nothing,
    pack_bits,
    paged,
    union,
    unpack_bits,
    window,
)
from jsparse.selection.attended import attended_tokens, read_tokens, token_mask
from tests.support.marks import slow_except

B, K, P, M = 2, 2, 8, 5
S = P * M
KINDS = ("token", "page", "bits")
seeds = st.integers(0, 2**32 - 1)


def random_selection(rng: np.random.Generator, kind: str, capacity: int, dense: bool) -> Selection:
    """Draws any valid list: distinct, ascending, then zeros.

    Ids may be past a head's length, and bits may be 0.
    """
    units = S if kind == "token" else M
    ids = np.zeros((B, K, capacity), np.int32)
    count = rng.integers(0, min(capacity, units) + 1, (B, K)).astype(np.int32)
    for b, k in np.ndindex(B, K):
        ids[b, k, : count[b, k]] = np.sort(rng.choice(units, count[b, k], replace=False))
    bits = rng.integers(0, 2**P, ids.shape).astype(np.uint32) if kind == "bits" else None
    if bits is not None:
        bits[rng.random(ids.shape) < 0.2] = 0
    flags = rng.random((B, K)) < 0.4 if dense else None
    granularity = "token" if kind == "token" else "page"
    ids, count, bits, flags = jax.device_put((ids, count, bits, flags))
    return Selection(ids, count, bits=bits, dense=flags, granularity=granularity)


def on_host(selection: Selection) -> SimpleNamespace:
    """Returns its fields as numpy arrays, which are faster in a loop."""
    fields = {name: getattr(selection, name) for name in ("ids", "count", "bits", "dense")}
    return SimpleNamespace(**jax.device_get(fields), granularity=selection.granularity)


def random_lengths(rng: np.random.Generator) -> np.ndarray:
    edges = np.array([0, 1, P - 1, P, P + 1, S - 1, S])
    free = rng.integers(0, S + 1, (B, K))
    lengths = np.where(rng.random((B, K)) < 0.5, rng.choice(edges, (B, K)), free)
    return lengths.astype(np.int32)


def slow_mask(selection: Selection, lengths, *, page_size: int = P, slots: int = S) -> np.ndarray:
    chosen, lengths = on_host(selection), np.asarray(lengths)
    mask = np.zeros((*lengths.shape, slots), bool)
    for b, k in np.ndindex(*lengths.shape):
        n = int(chosen.count[b, k])
        for at in range(n):
            unit = int(chosen.ids[b, k, at])
            if chosen.granularity == "token":
                mask[b, k, unit] = True
                continue
            for t in range(page_size):
                if chosen.bits is None or int(chosen.bits[b, k, at]) >> t & 1:
                    mask[b, k, unit * page_size + t] = True
        length = int(lengths[b, k])
        if n and length:
            mask[b, k, length - 1] = True
        if chosen.dense is not None and chosen.dense[b, k]:
            mask[b, k] = True
        mask[b, k, length:] = False
    return mask


def slow_read(selection: Selection, lengths) -> np.ndarray:
    """Counts the tokens of every page that holds an attended or a listed token."""
    chosen, lengths = on_host(selection), np.asarray(lengths)
    total = np.zeros(lengths.shape, int)
    for b, k in np.ndindex(*lengths.shape):
        length, n = int(lengths[b, k]), int(chosen.count[b, k])
        pages = set(np.asarray(chosen.ids[b, k, :n]).tolist()) | (
            {(length - 1) // P} if n and length else set()
        )
        total[b, k] = sum(min(max(length - page * P, 0), P) for page in pages)
        if chosen.dense is not None and chosen.dense[b, k]:
            total[b, k] = length
    return total


@functools.partial(jax.jit, static_argnames=("num_pages", "page_size"))
def counted(selection, lengths, num_pages=M, page_size=P):
    """Returns the mask, and the numbers of attended and read tokens, from one program."""
    return (
        token_mask(selection, lengths, num_pages=num_pages, page_size=page_size),
        attended_tokens(selection, lengths, page_size),
        read_tokens(selection, lengths, page_size),
    )


def mask_of(selection, lengths) -> np.ndarray:
    return np.asarray(counted(selection, lengths)[0])


join = jax.jit(union, static_argnums=2)
no_tokens = jax.jit(nothing, static_argnums=1)
all_tokens = jax.jit(everything)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(seed=seeds)
def test_mask_and_counts(kind, seed):
    rng = np.random.default_rng(seed)
    selection, lengths = random_selection(rng, kind, 4, seed % 2 > 0), random_lengths(rng)
    expected = slow_mask(selection, lengths)
    mask, attended, read = counted(selection, lengths)
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(attended, expected.sum(-1))
    if kind == "token":
        np.testing.assert_array_equal(read, expected.sum(-1))
    else:
        np.testing.assert_array_equal(read, slow_read(selection, lengths))


def test_newest_token_is_added_only_to_a_list():
    lengths = np.array([[11]], np.int32)
    ids, bits = np.array([[[0]]], np.int32), np.array([[[0b10]]], np.uint32)
    listed = Selection(*jax.device_put((ids, np.array([[1]], np.int32), bits)))
    mask, attended, read = map(np.asarray, counted(listed, lengths, num_pages=2))
    assert np.flatnonzero(mask).tolist() == [1, 10]
    assert attended.item() == 2
    assert read.item() == 8 + 3  # the newest token's page holds three
    empty = Selection(listed.ids, jax.device_put(np.array([[0]], np.int32)), listed.bits)
    mask, attended, read = map(np.asarray, counted(empty, lengths, num_pages=2))
    assert not mask.any()
    assert attended.item() == read.item() == 0


@pytest.mark.parametrize("granularity", ["page", "token"])
def test_empty_and_full_selections(granularity):
    lengths = np.array([[0, 1], [S, 13]], np.int32)
    for found in counted(no_tokens(lengths, granularity), lengths):
        np.testing.assert_array_equal(found, np.zeros_like(found))
    mask, attended, read = counted(all_tokens(lengths), lengths)
    np.testing.assert_array_equal(mask, np.arange(S) < lengths[..., None])
    np.testing.assert_array_equal(attended, lengths)
    np.testing.assert_array_equal(read, lengths)


@pytest.mark.parametrize(("page_size", "granularity"), [(8, "page"), (32, "page"), (8, "token")])
@pytest.mark.parametrize(
    "ends", slow_except([(0, 0), (9, 17), (100, 0), (2**40, 2**40), (0, 2**30)], (9, 17)), ids=str
)
def test_window_is_the_obvious_mask(ends, page_size, granularity):
    (sink, recent), num_pages = ends, 96 // page_size

    @jax.jit
    def run(lengths):
        chosen = window(
            lengths,
            sink=sink,
            recent=recent,
            num_pages=num_pages,
            page_size=page_size,
            granularity=granularity,
        )
        mask = token_mask(chosen, lengths, num_pages=num_pages, page_size=page_size)
        return chosen, mask, attended_tokens(chosen, lengths, page_size)

    lengths = np.arange(0, 97, dtype=np.int32).reshape(1, -1)  # every possible length
    chosen, got, attended = run(lengths)
    slot, length = np.arange(96), lengths.astype(np.int64)[..., None]
    inside = (slot < length) & ((slot < sink) | (slot >= length - recent))
    expected = inside | (slot == length - 1) & inside.any(-1, keepdims=True)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(attended, expected.sum(-1))
    assert_well_formed(chosen)
    if chosen.bits is not None:  # no other bits, not even past the end of page or head
        bits = inside.reshape(1, 97, -1, page_size) << np.arange(page_size, dtype=np.uint64)
        words = np.take_along_axis(bits.sum(-1), np.asarray(chosen.ids), axis=-1)
        valid = np.arange(chosen.ids.shape[-1]) < chosen.count[..., None]
        np.testing.assert_array_equal(chosen.bits, np.where(valid, words, 0))
    maximum = (
        -(-sink // page_size) + -(-recent // page_size) + 1
        if granularity == "page"
        else sink + recent
    )
    assert chosen.ids.shape[-1] <= min(maximum, 96)


def assert_well_formed(selection: Selection) -> None:
    chosen = on_host(selection)
    for b, k in np.ndindex(*chosen.count.shape):
        n, ids = int(chosen.count[b, k]), chosen.ids[b, k]
        assert (np.diff(ids[:n]) > 0).all(), ids
        assert not ids[n:].any(), ids
        if chosen.bits is not None:
            assert not chosen.bits[b, k, n:].any()


@pytest.mark.parametrize(
    "kinds", [("token", "token"), ("page", "page"), ("bits", "page"), ("bits", "bits")]
)
@settings(max_examples=25)
@given(seed=seeds)
def test_union_is_the_or_of_the_masks(kinds, seed):
    rng = np.random.default_rng(seed)
    a, b = (random_selection(rng, kind, n, n == 4) for kind, n in zip(kinds, (4, 3), strict=True))
    units = S if kinds[0] == "token" else M
    lengths = random_lengths(rng)
    both = join(a, b, units)
    np.testing.assert_array_equal(
        mask_of(both, lengths), slow_mask(a, lengths) | slow_mask(b, lengths)
    )
    assert both.ids.shape[-1] <= units
    assert_well_formed(both)


def test_union_of_empty_lists_keeps_dense_heads():
    lengths = np.array([[3, 9]], np.int32)
    both = join(no_tokens(lengths, "page"), all_tokens(lengths), M)
    np.testing.assert_array_equal(mask_of(both, lengths), np.arange(S) < lengths[..., None])


@pytest.mark.parametrize("page_size", [8, 32])
def test_bits_round_trip(page_size):
    marks = np.random.default_rng(page_size).random((3, 4, page_size)) < 0.5
    marks[0, 0], marks[0, 1] = True, False
    words, unpacked = jax.jit(lambda x: (pack_bits(x), unpack_bits(pack_bits(x), page_size)))(marks)
    words = np.asarray(words)
    assert words.dtype == np.uint32
    for at in np.ndindex(3, 4):
        assert int(words[at]) == sum(1 << t for t in range(page_size) if marks[at][t])
    np.testing.assert_array_equal(unpacked, marks)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def of_tokens(marks, capacity, page_size, granularity):
    return from_token_mask(marks, capacity, page_size=page_size, granularity=granularity)


@pytest.mark.parametrize("granularity", ["page", "token"])
@settings(max_examples=40)
@given(seed=seeds)
@example(seed=0)
def test_token_masks_round_trip(granularity, seed):
    rng = np.random.default_rng(seed)
    marks = rng.random((B, K, S)) < rng.choice([0.0, 0.05, 0.5, 1.0], (B, K, 1))
    lengths = np.full((B, K), S, np.int32)
    selection = of_tokens(marks, S if granularity == "token" else M, P, granularity)
    expected = marks.copy()
    expected[..., -1] |= marks.any(-1)
    np.testing.assert_array_equal(mask_of(selection, lengths), expected)
    assert_well_formed(selection)


in_pages = jax.jit(functools.partial(paged, num_pages=M, page_size=P))


@settings(max_examples=40)
@given(seed=seeds)
@example(seed=0)
def test_listed_tokens_as_pages_are_the_same_tokens(seed):
    rng = np.random.default_rng(seed)
    tokens, lengths = random_selection(rng, "token", 4, True), random_lengths(rng)
    pages = in_pages(tokens)
    assert pages.granularity == "page"
    assert_well_formed(pages)
    np.testing.assert_array_equal(mask_of(pages, lengths), slow_mask(tokens, lengths))
    assert paged(pages, num_pages=M, page_size=P) is pages


of_pages = jax.jit(from_page_mask, static_argnums=1)


@settings(max_examples=25)
@given(seed=seeds)
def test_page_masks_round_trip(seed):
    marks = np.random.default_rng(seed).random((B, K, M)) < 0.5
    marks[..., -1] |= marks.any(-1)  # the newest token's page
    selection = of_pages(marks, M)
    got = mask_of(selection, np.full((B, K), S, np.int32))
    np.testing.assert_array_equal(got, np.repeat(marks, P, axis=-1))
    assert_well_formed(selection)


def test_impossible_arguments_are_refused():
    tokens = random_selection(np.random.default_rng(0), "token", 4, False)
    with pytest.raises(ValueError, match="granularity='token': must equal"):
        union(random_selection(np.random.default_rng(0), "page", 4, False), tokens, M)
    with pytest.raises(ValueError, match="page_size=33: must be at most 32"):
        pack_bits(jax.device_put(np.zeros((1, 33), bool)))
    with pytest.raises(ValueError, match="page_size=64: must be at most 32"):
        paged(tokens, num_pages=1, page_size=64)
