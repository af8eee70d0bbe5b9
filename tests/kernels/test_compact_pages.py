"""Tests compact_pages against a loop over rows, case by case."""

import jax
import numpy as np
import pytest

from jsparse import cache
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.selection import Selection, nothing
from tests.kernels.cases.compact_pages import CASES, Case
from tests.support.marks import slow_except, slow_except_named

by_name = {case.name: case for case in CASES}
POOLS = ("k", "v", "bias", "slot_positions")


def kept_of(inputs, head):
    """Lists the old slots that a head must hold afterwards, or None if it stays unchanged."""
    stays = inputs.rewrite is not None and not bool(inputs.rewrite[head])
    stays |= inputs.keep.dense is not None and bool(inputs.keep.dense[head])
    return None if stays else np.asarray(inputs.keep.ids)[head][: int(inputs.keep.count[head])]


compact = jax.jit(compact_pages)
read_heads = jax.jit(cache.read_heads)
# one of them compiles for several
SOME = (
    "few",
    "all_kept",
    "newer_half",
    "newest_only",
    "every_other_head",
    "dense_heads_stay",
    "pages_of_8",
)


def bare(layer):
    """Returns the layer without pools, so that one program reads all pools of a shape."""
    return layer._replace(**dict.fromkeys(POOLS[1:]), free=None)


def heads_of(layer):
    """Reads every pool by head and slot, as a dict of arrays [B, K, S, …]."""
    pools = {name: getattr(layer, name) for name in POOLS if getattr(layer, name) is not None}
    return {name: np.asarray(read_heads(pool, bare(layer))) for name, pool in pools.items()}


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
def test_rows_move_in_order(case):
    inputs = case.build()
    out = compact(inputs.layer, inputs.keep, rewrite=inputs.rewrite)
    before, after = heads_of(inputs.layer), heads_of(out)
    assert before.keys() == after.keys()
    for head in np.ndindex(*inputs.layer.lengths.shape):
        kept = kept_of(inputs, head)
        held = int(inputs.layer.lengths[head])
        if kept is None:
            kept = np.arange(held)
        assert int(out.lengths[head]) == kept.size
        for name, rows in before.items():
            np.testing.assert_array_equal(after[name][head][: kept.size], rows[head][kept])
            if inputs.layer.block_table is None:  # rows past the new length stay
                np.testing.assert_array_equal(
                    after[name][head][kept.size :], rows[head][kept.size :]
                )


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["scrambled", "newer_half", "every_other_head", "none_kept"],
        "newer_half",
        "every_other_head",
    ),
)
def test_only_emptied_pages_are_freed(name):
    inputs = by_name[name].build()
    before, out = inputs.layer, compact(*inputs[:2], rewrite=inputs.rewrite)
    assert out.free is not None
    size, scratch = before.page_size, before.k.shape[0] - 1
    needed = -(-np.asarray(out.lengths) // size)
    table = np.asarray(out.block_table)
    np.testing.assert_array_equal((table != scratch).sum(-1), needed)
    free = np.asarray(out.free.pages)[: int(out.free.count)]
    assert sorted([*free, *table[table != scratch]]) == list(range(scratch))
    untouched = np.setdiff1d(np.arange(scratch + 1), table[table != scratch])
    np.testing.assert_array_equal(np.asarray(out.k)[untouched], np.asarray(before.k)[untouched])


def test_compacted_head_appends_at_its_new_end():
    inputs = by_name["scrambled"].build()
    layer = compact(*inputs[:2], rewrite=inputs.rewrite)
    kv = cache.KVCache((layer,), np.zeros(2, np.int32), np.zeros(2, bool))
    kept = heads_of(kv.layers[0])["k"]
    new = np.full((2, 1, 2, 64), -7, np.float32)
    lengths = np.asarray(kv.layers[0].lengths)
    append = jax.jit(cache.append, static_argnums=1)
    after = append(kv, 0, new, new, np.full((2, 1), 99, np.int32), np.ones(2, np.int32))
    assert not np.asarray(after.overflow).any()
    rows = heads_of(after.layers[0])
    for head in np.ndindex(*lengths.shape):
        end = lengths[head]
        np.testing.assert_array_equal(rows["k"][head][:end], kept[head][:end])
        np.testing.assert_array_equal(rows["k"][head][end], np.full(64, -7.0))
        assert (rows["bias"][head][end], rows["slot_positions"][head][end]) == (0, 99)


def test_donated_layer_is_rewritten_in_place():
    layer, keep, _ = by_name["few"].build()
    out = jax.jit(compact_pages, donate_argnums=0)(layer, keep)
    assert all(
        leaf.is_deleted() for leaf in jax.tree.leaves([getattr(layer, name) for name in POOLS])
    )
    assert out.k.shape == layer.k.shape


def test_wrong_calls_are_refused():
    layer, keep, _ = Case("").build()
    with pytest.raises(ValueError, match="granularity='page': compact_pages takes 'token'"):
        compact_pages(layer, nothing(layer.lengths))
    bits = jax.device_put(np.asarray(keep.ids, np.uint32))
    with_bits = Selection.tree_unflatten("token", (keep.ids, keep.count, bits, None, None))
    with pytest.raises(ValueError, match=r"keep.bits.shape=\(2, 2, 96\): must be None"):
        compact_pages(layer, with_bits)
