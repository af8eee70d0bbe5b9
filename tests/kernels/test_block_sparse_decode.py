"""Tests block_sparse_decode against dense attention in float64, case by case."""

from functools import cache

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.block_sparse_decode.cascade import cascade
from jsparse.pallas_kernels.block_sparse_decode.reference import gathered, masked
from jsparse.partials import merge
from jsparse.selection import Selection, everything, nothing
from tests.kernels.cases.block_sparse_decode import CASES, JUNK, Case
from tests.support.decode_checks import (
    assert_matches_dense,
    assert_reports_rounded_mean,
    assert_rounds_o,
    in_families,
    tolerance,
)
from tests.support.dense_attention import expected
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}
SPARSE = [case for case in CASES if case.dense == "none"]


@pytest.mark.parametrize(
    "case",
    slow_except_named(CASES, "few_listed", "head_dim_96", "bits_newest_unlisted", "dense_and_bits"),
    ids=str,
)
def test_matches_dense_attention(case):
    assert_matches_dense(block_sparse_decode, case)


@pytest.mark.parametrize("case", slow_except_named(SPARSE[::3], "bits_32"), ids=str)
def test_reading_all_and_masking_is_reading_what_is_listed(case):
    inputs, scale = case.build(1), 0.1

    @jax.jit
    def both(inputs):
        return [
            f(inputs.q, inputs.layer, inputs.selection, scale, "token_logits")
            for f in (masked, gathered)
        ]

    a, b = both(inputs)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance(case))


def test_o_comes_in_the_type_that_is_asked_for():
    assert_rounds_o(block_sparse_decode, by_name["bfloat16"])


def test_logits_reported_are_those_of_the_mean_query_in_the_queries_type():
    assert_reports_rounded_mean(block_sparse_decode, "page")


def test_cases_are_what_they_say():
    assert len(by_name) == len(CASES)
    for case in CASES:
        q, layer, selection = case.build(3)
        assert q.shape == (case.batch, case.kv_heads * case.group, case.head_dim)
        assert (layer.num_pages, layer.page_size) == (case.num_pages, case.page_size)
        assert (np.asarray(layer.lengths) <= case.slots).all()
        assert (np.asarray(selection.count) <= selection.ids.shape[-1]).all()
        np.testing.assert_array_equal(q, case.build(3).q)
    ragged = np.asarray(by_name["pages"].build().layer.lengths)
    assert {0, 1, by_name["pages"].slots} <= set(ragged.flat)
    assert (np.asarray(by_name["few_listed"].build().layer.k) == np.float32(JUNK)).any()
    logits = np.asarray(by_name["huge_logits"].build().layer.k)
    assert np.abs(logits[logits != JUNK]).max() > 1e4
    shared = by_name["shared_pages"].build().layer.block_table
    assert shared is not None
    assert len(np.unique(shared)) < shared.size


def test_pages_that_two_heads_share_are_read_by_both():
    """Two heads with the same table row see the same K: equal queries get equal results."""
    _, layer, _ = Case("", batch=1, group=1, lengths="full", listed="all").build()
    table = np.broadcast_to(np.array([3, 0, 5, 1, 1, 7], np.int32), (1, 2, 6))
    q = np.broadcast_to(np.linspace(-1, 1, 64, dtype=np.float32), (1, 2, 64))

    @jax.jit
    def run(q, layer):
        return block_sparse_decode(q, layer, everything(layer.lengths)).o

    o = np.asarray(run(q, layer._replace(block_table=table)))
    np.testing.assert_array_equal(o[0, 0], o[0, 1])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_pages_that_rows_have_in_common_are_read_once_for_all(bias):
    case = Case(
        "", batch=8, lengths="full", listed="none", dense="all", table="scrambled", bias=bias
    )
    # a family of one row, families that nobody is in, and rows without a family
    families, tokens = [[1, 4, 6, 7], [5], [0, 2], []], [48, 32, 96, 0]
    inputs = in_families(case.build(), families, tokens)
    want = expected(inputs, None)
    read = []

    def attend(q, layer, selection, **options):
        read.append(layer.lengths)
        return block_sparse_decode(q, layer, selection, **options)

    @jax.jit
    def run(inputs):
        q, layer, selection = inputs
        out = block_sparse_decode(q, layer, selection)
        cascade(attend, q, layer, layer.prefixes, selection, np.float32)
        return out, block_sparse_decode(q, layer, selection, stats="page_mass"), read

    out, with_report, (common, rest) = run(inputs)
    for each in (out, with_report):
        np.testing.assert_allclose(each.o, want.o, **tolerance(case))
        np.testing.assert_allclose(each.lse, want.lse, **tolerance(case))
        np.testing.assert_array_equal(np.asarray(each.o)[np.isneginf(want.lse)], 0)
    # every common page is read for its family, and for none of its rows
    np.testing.assert_array_equal(common[:, 0], tokens)
    before = np.array([96, 48, 96, 0, 48, 32, 48, 48])
    np.testing.assert_array_equal(
        rest, np.maximum(np.asarray(inputs.layer.lengths) - before[:, None], 0)
    )


def test_partials_of_two_halves_merge_to_the_whole():
    case = Case("", listed="all", lengths="full", num_pages=6)
    q, layer, _ = case.build()
    halves = [np.broadcast_to(np.arange(n, n + 3, dtype=np.int32), (2, 2, 3)) for n in (0, 3)]
    count = np.full((2, 2), 3, np.int32)

    @jax.jit
    def run(q, layer, halves, count):
        # cut short, the first half does not take the newest token too
        short = layer._replace(lengths=layer.lengths // 2)
        first = block_sparse_decode(q, short, Selection(halves[0], count))
        second = block_sparse_decode(q, layer, Selection(halves[1], count))
        whole = block_sparse_decode(q, layer, everything(layer.lengths))
        return whole, merge(first.o, first.lse, second.o, second.lse)

    whole, (o, lse) = run(q, layer, halves, count)
    np.testing.assert_allclose(o, whole.o, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-5, atol=2e-5)


def test_a_row_does_not_depend_on_its_batch():
    q, layer, selection = Case("", table="scrambled", lengths="full", batch=3).build()
    run = jax.jit(block_sparse_decode)
    whole = run(q, layer, selection)
    q, lengths = np.array(q), np.array(layer.lengths)
    q[1:], lengths[1:] = 7, 3
    changed = run(q, layer._replace(lengths=lengths), selection)
    for a, b in ((whole.o, changed.o), (whole.lse, changed.lse)):
        np.testing.assert_array_equal(np.asarray(a)[0], np.asarray(b)[0])


def part(x, *of):
    return jax.device_put(np.asarray(x)[of])


@cache
def wrong_calls():
    q, layer, selection = Case("").build()
    ids, count = selection.ids, selection.count
    small = layer._replace(lengths=part(layer.lengths, slice(1)))
    large = Case("", page_size=64).build()
    bits = jax.device_put(np.zeros(large.selection.ids.shape, np.uint32))
    return {
        "axes of q": (
            (part(q, 0), layer, selection),
            {},
            r"q=float32\[8, 64\]: must be float\[",
        ),
        "heads of q": (
            (part(q, slice(None), slice(5)), layer, selection),
            {},
            r"layer.lengths=int32\[2, 2\].*K a divisor of N=5",
        ),
        "rows of q": (
            (part(q, slice(1)), layer, selection),
            {},
            r"layer.lengths=int32\[2, 2\]: must be int32\[",
        ),
        "head dimension": (
            (part(q, ..., slice(32)), layer, selection),
            {},
            r"layer.k=float32\[24, 16, 64\]: must be float\[",
        ),
        "rows of the cache": ((q, small, selection), {}, "must be"),
        "rows of ids": (
            (q, layer, Selection(part(ids, slice(1)), part(count, slice(1)))),
            {},
            r"selection.ids=int32\[1, 2, 6\]: must be int32\[",
        ),
        "granularity": (
            (q, layer, nothing(layer.lengths, "token")),
            {},
            "granularity='token'.*takes 'page'",
        ),
        "bits of a large page": (
            (large.q, large.layer, Selection(large.selection.ids, large.selection.count, bits)),
            {},
            "page_size=64: must be at most 32",
        ),
        "backend": (
            (q, layer, selection),
            {"implementation": "abacus"},
            "implementation='abacus': block_sparse_decode has",
        ),
        "stats": (
            (q, layer, selection),
            {"stats": "all"},
            r"stats='all': must be None or one of \['page_mass', 'token_logits', 'listed_logits'\]",
        ),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_calls_are_refused(name):
    args, kwargs, message = wrong_calls()[name]
    with pytest.raises(ValueError, match=message) as error:
        block_sparse_decode(*args, **kwargs)
    assert "\n" not in str(error.value)
