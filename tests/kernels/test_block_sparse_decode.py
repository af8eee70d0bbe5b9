"""Tests block_sparse_decode against float64 dense attention, case by case."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.block_sparse_decode.cascade import cascade
from jsparse.pallas_kernels.selected_attention import gathered, masked
from jsparse.selection import Selection, nothing
from tests.kernels.cases.block_sparse_decode import CASES, INT8_CASES, Case
from tests.support.decode_checks import (
    assert_matches_dense,
    assert_reports_rounded_mean,
    assert_rounds_o,
    in_families,
    tolerance,
)
from tests.support.dense_attention import expected
from tests.support.marks import slow_except, slow_except_named

by_name = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    "case",
    slow_except_named(
        (*CASES, *INT8_CASES),
        *("few_listed", "head_dim_96", "bits_newest_unlisted", "dense_and_bits", "int8_bits"),
    ),
    ids=str,
)
def test_matches_dense_attention(case):
    assert_matches_dense(block_sparse_decode, case)


def test_masked_full_read_matches_the_listed_read():
    case, scale = by_name["bits_32"], 0.1
    inputs = case.build(1)

    @jax.jit
    def both(inputs):
        return [
            f(inputs.q, inputs.layer, inputs.selection, scale, "token_logits")
            for f in (masked, gathered)
        ]

    a, b = both(inputs)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance(case))


def test_o_has_the_requested_dtype():
    assert_rounds_o(block_sparse_decode, by_name["bfloat16"])


def test_reported_logits_are_of_the_mean_query_rounded_to_its_dtype():
    assert_reports_rounded_mean(block_sparse_decode, "page")


@pytest.mark.parametrize("int8", slow_except([False, True], False))
def test_shared_pages_are_read_once_for_all_rows(int8):
    given = {"batch": 8, "lengths": "full", "listed": "none", "dense": "all", "bias": True}
    case = Case("", table="scrambled", int8=int8, **given)
    # a prefix group of one row, empty groups, and rows without a group
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
    # every shared page is read for its group, and for none of its rows
    np.testing.assert_array_equal(common[:, 0], tokens)
    before = np.array([96, 48, 96, 0, 48, 32, 48, 48])
    np.testing.assert_array_equal(
        rest, np.maximum(np.asarray(inputs.layer.lengths) - before[:, None], 0)
    )


def test_wrong_calls_are_refused():
    q, layer, selection = Case("").build()
    large = Case("", page_size=64).build()
    bits = jax.device_put(np.zeros(large.selection.ids.shape, np.uint32))
    listed = Selection(large.selection.ids, large.selection.count, bits)
    for args, stats, message in (
        ((q, layer, nothing(layer.lengths, "token")), None, "granularity='token'.*takes 'page'"),
        ((large.q, large.layer, listed), None, "page_size=64: must be at most 32"),
        ((q, layer, selection), "all", r"stats='all': must be None or one of \['page_mass'"),
    ):
        with pytest.raises(ValueError, match=message):
            block_sparse_decode(*args, stats=stats)
