"""Tests the cache against a model of dicts of lists: contents, owners of pages, overflow."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse import cache as kv
from tests.support.small_cache import B, K, M, P, S, T, small_spec

H = 2
SPEC = small_spec(head_dim=H, num_layers=2)
FIELDS = kv.OPTIONAL_FIELDS  # bias, slot_positions
HEADS = list(np.ndindex(B, K))

append = jax.jit(kv.append, static_argnums=1)
truncate = jax.jit(kv.truncate)
write = jax.jit(kv.write)
grow = jax.jit(kv.grow, static_argnums=2)
init = jax.jit(kv.init, static_argnums=0, static_argnames="fields")
cut_pages = jax.jit(kv.cut_pages, static_argnums=1)


@jax.jit
def heads_of(layer):
    """Reads K, V, biases and positions of every slot of every head."""
    return [kv.read_heads(pool, layer) for pool in (layer.k, layer.v, *fields_of(layer))]


def fields_of(layer):
    return [getattr(layer, name) for name in FIELDS]


def overflows(cache) -> bool:
    return bool(np.asarray(cache.overflow).any())


valid_counts = st.tuples(st.just("append"), st.lists(st.integers(0, T), min_size=B, max_size=B))
cuts = st.tuples(st.just("truncate"), st.lists(st.integers(0, S), min_size=B * K, max_size=B * K))
rewrites = st.tuples(st.just("write"), st.lists(st.integers(0, T), min_size=B, max_size=B))
histories = st.lists(valid_counts | cuts | rewrites, min_size=1, max_size=12)


class Pair:
    """Runs the same operations on the cache and its model.

    The model is a list of (k, v, bias, position) for each head.
    """

    def __init__(self, pool_pages: int | None):
        self.cache = init(SPEC._replace(pool_pages=pool_pages), fields=FIELDS)
        self.heads = {head: [] for head in HEADS}
        self.pool_pages = pool_pages
        self.written = 0

    @property
    def layer(self) -> Any:
        return self.cache.layers[1]

    def new_tokens(self):
        size = B * T * K * H
        k = np.arange(self.written, self.written + size, dtype=np.float32).reshape(B, T, K, H) + 1
        self.written += size
        positions = np.arange(self.written, self.written + B * T, dtype=np.int32).reshape(B, T)
        return k, -k, positions

    def append(self, valid):
        k, v, positions = self.new_tokens()
        self.cache = append(self.cache, 1, k, v, positions, np.array(valid, np.int32))
        for b, n in HEADS:
            rows = [(k[b, t, n], v[b, t, n], 0.0, positions[b, t]) for t in range(valid[b])]
            self.heads[b, n] += rows

    def fits(self, valid) -> bool:
        lengths = {head: len(rows) + valid[head[0]] for head, rows in self.heads.items()}
        if max(lengths.values()) > S:
            return False
        return (
            self.pool_pages is None
            or sum(-(-n // P) for n in lengths.values()) <= self.pool_pages - 1
        )

    def truncate(self, lengths):
        self.cache = kv.replace_layer(
            self.cache, 1, truncate(self.layer, np.array(lengths, np.int32).reshape(B, K))
        )
        for (b, n), rows in self.heads.items():
            del rows[lengths[b * K + n] :]

    def rewrite(self, valid):
        """Rewrites the newest tokens, as many as each row's shortest head holds."""
        count = [min(valid[b], *(len(self.heads[b, n]) for n in range(K))) for b in range(B)]
        k, v, positions = self.new_tokens()
        first = np.array(self.layer.lengths) - np.array(count, np.int32)[:, None]
        self.cache = kv.replace_layer(
            self.cache, 1, write(self.layer, k, v, positions, np.array(count, np.int32), first)
        )
        for b, n in HEADS:
            rows = self.heads[b, n]
            for t in range(count[b]):
                rows[len(rows) - count[b] + t] = (k[b, t, n], v[b, t, n], 0.0, positions[b, t])

    def check(self):
        lengths, held = np.asarray(self.layer.lengths), list(map(np.asarray, heads_of(self.layer)))
        for (b, n), rows in self.heads.items():
            assert lengths[b, n] == len(rows)
            for column, got in enumerate(held):
                expected = np.array([row[column] for row in rows]).reshape(
                    len(rows), *got.shape[3:]
                )
                np.testing.assert_array_equal(got[b, n, : len(rows)], expected)
        untouched = self.cache.layers[0]
        assert not np.asarray(untouched.k).any()
        assert not np.asarray(untouched.lengths).any()

    def check_pages(self):
        assert self.pool_pages is not None
        layer, scratch = self.layer, self.pool_pages - 1
        table, free = (
            np.asarray(layer.block_table),
            np.asarray(layer.free.pages)[: int(layer.free.count)],
        )
        used = -(-np.asarray(layer.lengths) // P)
        owned = [page for b, n in HEADS for page in table[b, n, : used[b, n]].tolist()]
        assert sorted(owned + free.tolist()) == list(
            range(scratch)
        )  # each page has one owner, or is free
        for b, n in HEADS:
            assert (table[b, n, used[b, n] :] == scratch).all()


@pytest.mark.parametrize("pool_pages", [None, 8])
@settings(max_examples=80)
@given(history=histories)
def test_any_history_reads_back_as_written(pool_pages, history):
    pair = Pair(pool_pages)
    for name, numbers in history:
        if name == "append" and not pair.fits(numbers):
            pair.append(numbers)
            assert overflows(pair.cache)
            return
        getattr(pair, "rewrite" if name == "write" else name)(numbers)
        assert not overflows(pair.cache)
        pair.check()
        if pool_pages is not None:
            pair.check_pages()


@pytest.mark.parametrize("pool_pages", [None, 8])
@settings(max_examples=40)
@given(history=st.lists(valid_counts, min_size=2, max_size=8))
def test_overflow_changes_no_held_token(pool_pages, history):
    pair = Pair(pool_pages)
    for _, valid in history:
        held = {head: len(rows) for head, rows in pair.heads.items()}
        fitted = pair.fits(valid)
        pair.append(valid)
        overflow = np.asarray(pair.cache.overflow)
        assert overflow.any() == (not fitted)
        if not fitted:
            break
    keys, lengths = np.asarray(heads_of(pair.layer)[0]), np.asarray(pair.layer.lengths)
    for (b, n), rows in pair.heads.items():
        # a row without room appends nothing, the others everything
        taken = [row[0] for row in (rows[: held[b, n]] if overflow[b] else rows)]
        assert lengths[b, n] == len(taken)
        np.testing.assert_array_equal(keys[b, n, : len(taken)], np.array(taken).reshape(-1, H))
        if pool_pages is None:
            assert not keys[b, n, len(taken) :].any()


def test_pool_can_be_filled_to_its_last_page():
    pair = Pair(9)
    for valid in ([T, 2], [2, T], [0, 0]):
        pair.append(valid)
        assert not overflows(pair.cache)
        pair.check()
        pair.check_pages()
    assert int(pair.layer.free.count) == 0
    pair.append([0, 1])
    assert overflows(pair.cache)


def test_append_overwrites_a_bias():
    pair = Pair(None)
    pair.append([2, 2])
    layer = pair.layer._replace(bias=jnp.asarray(np.ones_like(pair.layer.bias)))
    pair.cache = kv.replace_layer(pair.cache, 1, layer)
    pair.append([1, 1])
    _, _, bias, _ = heads_of(pair.layer)
    np.testing.assert_array_equal(np.asarray(bias)[0, 0, :4], [1, 1, 0, 1])


def test_slots_are_positions_unless_stored():
    plain = init(SPEC).layers[0]
    assert (plain.bias, plain.slot_positions, plain.free, plain.block_table) == (None,) * 4
    positions_of = jax.jit(kv.slot_positions)
    np.testing.assert_array_equal(positions_of(plain), np.broadcast_to(np.arange(S), (B, K, S)))
    pair = Pair(8)
    pair.append([2, 1])
    positions = np.asarray(positions_of(pair.layer))
    assert positions[0, 1, :2].tolist() == [row[3] for row in pair.heads[0, 1]]


@pytest.mark.parametrize("paged", [False, True])
def test_pages_slots_and_heads_read_the_same(paged):
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(B * K * M, P, H)).astype(np.float32)
    table = rng.permutation(B * K * M).reshape(B, K, M).astype(np.int32) if paged else None
    layer = kv.LayerCache(pool, pool, np.full((B, K), S, np.int32), table)
    logical = rng.integers(0, M, (B, K, 4)).astype(np.int32)
    slots = rng.integers(0, S, (B, K, 7)).astype(np.int32)

    @jax.jit
    def read(layer, logical, slots):
        return (
            kv.read_heads(layer.k, layer),
            kv.read_pages(layer.k, layer, logical),
            kv.read_slots(layer.k, layer, slots),
        )

    heads, pages, rows = map(np.asarray, read(layer, logical, slots))
    for b, k in HEADS:
        whole = heads[b, k].reshape(M, P, H)
        lies = (
            range((b * K + k) * M, (b * K + k + 1) * M) if table is None else table[b, k].tolist()
        )
        np.testing.assert_array_equal(whole, pool[np.array(lies)])
        np.testing.assert_array_equal(pages[b, k], whole[logical[b, k]])
        np.testing.assert_array_equal(rows[b, k], heads[b, k][slots[b, k]])
    assert (layer.page_size, layer.num_pages, layer.capacity) == (P, M, S)


def test_tokens_are_rounded_once_on_store():
    cache = init(SPEC._replace(dtype=jnp.bfloat16))
    k = np.full((B, 1, K, H), 1.00390625 + 1e-4, np.float32)
    cache = append(cache, 0, k, k, np.zeros((B, 1), np.int32), np.ones(B, np.int32))
    held = np.asarray(cache.layers[0].k)
    assert held.dtype == jnp.bfloat16
    np.testing.assert_array_equal(held[0, 0], k[0, 0, 0].astype(jnp.bfloat16))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"unknown \['age'\], must be among"):
        kv.init(SPEC, fields=("bias", "age"))
    with pytest.raises(ValueError, match="pool_pages=1: must be at least 2"):
        kv.init(SPEC._replace(pool_pages=1))


def test_row_without_room_stops_and_the_others_continue():
    """A pool of 8 pages, one of them scratch; row 1 would need a page for each of its heads."""
    pair = Pair(8)
    pair.append([T, 2])
    pair.append([0, 3])
    assert pair.cache.overflow.tolist() == [False, True]
    free = int(pair.layer.free.count)
    lengths = np.asarray(pair.layer.lengths).tolist()
    pair.append([1, 1])
    assert pair.cache.overflow.tolist() == [False, True]
    assert np.asarray(pair.layer.lengths).tolist() == [[n + 1 for n in lengths[0]], lengths[1]]
    assert int(pair.layer.free.count) == free


def test_rows_after_one_without_room_are_served():
    """8 free pages and two heads: row 0 would need 16 pages, rows 1 and 2 need 2 each."""
    spec = SPEC._replace(batch=3, num_pages=12, pool_pages=9)
    cache = grow(init(spec), np.array([8 * P, 1, 1], np.int32), 8 * P)
    assert cache.overflow.tolist() == [True, False, False]
    assert [np.asarray(layer.lengths)[:, 0].tolist() for layer in cache.layers] == [[0, 1, 1]] * 2
    assert [int(layer.free.count) for layer in cache.layers if layer.free] == [4, 4]
    # a row that overflowed does not request pages again
    cache = grow(cache, np.array([8 * P, P, 1], np.int32), 8 * P)
    assert cache.overflow.tolist() == [True, False, False]


def test_growing_is_one_program_in_every_process():
    """Its text does not depend on addresses; otherwise others would not find it on disk."""
    spec = SPEC._replace(num_layers=12)
    shapes = jax.eval_shape(lambda: kv.init(spec)), jax.ShapeDtypeStruct((B,), jnp.int32)
    texts = set()
    for nth in range(6):
        kept = [object() for _ in range(37 * nth)]  # so that addresses differ
        texts.add(jax.jit(lambda *x: kv.grow(*x, 1)).lower(*shapes).as_text())
        del kept
    assert len(texts) == 1


def test_row_must_find_room_in_every_layer():
    """Layer 1 has fewer free pages than row 0 needs, so that neither layer allocates any."""
    cache = init(SPEC._replace(pool_pages=9))
    second = cache.layers[1]
    assert second.free is not None
    short = second._replace(free=second.free._replace(count=np.int32(2)))
    cache = grow(kv.replace_layer(cache, 1, short), np.array([P + 1, 1], np.int32), T)
    assert cache.overflow.tolist() == [True, False]
    assert [int(layer.free.count) for layer in cache.layers if layer.free] == [6, 0]


def test_cut_pages_keeps_the_first_pages_of_every_head():
    """In smaller pools of every field. Small caches, and caches with a block table, are not cut."""
    pair = Pair(None)
    pair.append([T, 3])
    bias = np.arange(B * K * M * P, dtype=np.float32).reshape(-1, P)
    layer = pair.layer._replace(bias=jnp.asarray(bias))
    cut = cut_pages(layer, 2)
    assert (cut.num_pages, cut.capacity) == (2, 2 * P)
    np.testing.assert_array_equal(cut.lengths, layer.lengths)
    for pool, was, now in zip(
        (cut.k, cut.v, *fields_of(cut)), heads_of(layer), heads_of(cut), strict=True
    ):
        assert pool.shape[0] == B * K * 2
        np.testing.assert_array_equal(now, np.asarray(was)[:, :, : 2 * P])
    pair.cache = kv.replace_layer(pair.cache, 1, cut_pages(pair.layer, 2))
    pair.append([1, 1])
    pair.check()
    assert not overflows(pair.cache)
    assert kv.cut_pages(layer, M) is layer
    assert kv.cut_pages(layer, M + 1) is layer
    paged = Pair(8).layer
    assert kv.cut_pages(paged, 1) is paged
