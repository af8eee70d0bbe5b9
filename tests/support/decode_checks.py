"""Checks the requirements on every backend of a decode op, for every case."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.cache import SharedPrefixes
from jsparse.selection import Granularity, Selection
from jsparse.selection.partials import StatsKind
from tests.kernels.cases.block_sparse_decode import Case, Inputs
from tests.support.dense_attention import expected


def in_families(inputs: Inputs, families: list[list[int]], tokens: list[int]) -> Inputs:
    """Returns dense rows, some of them grouped because their first tokens share pages.

    One head of each four is empty, and so is the last row. `inputs` has a block table of scattered
    pages, and full rows.
    """
    layer, rng = inputs.layer, np.random.default_rng(7)
    table, lengths = (np.array(each) for each in (layer.block_table, layer.lengths))
    rows = np.full((len(families), max(map(len, families))), len(lengths), np.int32)
    for nth, (members, held) in enumerate(zip(families, tokens, strict=True)):
        rows[nth, : len(members)] = members
        for row in members:
            pages = held // layer.page_size
            table[row, :, :pages] = table[members[0], :, :pages]
            lengths[row] = rng.integers(held, layer.capacity + 1, lengths.shape[1])
    lengths[-1] = 0
    put = jax.device_put
    nowhere = put(np.zeros((*lengths.shape, 0), np.int32))
    dense = np.arange(lengths.size).reshape(lengths.shape) % 4 != 2
    selection = Selection(nowhere, put(np.zeros_like(lengths)), dense=put(dense))
    prefixes = SharedPrefixes(put(rows), put(np.array(tokens, np.int32)))
    layer = layer._replace(block_table=put(table), lengths=put(lengths), prefixes=prefixes)
    return Inputs(inputs.q, layer, selection)


def tolerance(case: Case) -> dict[str, Any]:
    """Returns tolerances: bfloat16 weights are off by 2^-9, float32 by 1e-3 for logits of 1e4."""
    return (
        {"rtol": 2e-2, "atol": 2e-2} if case.dtype == "bfloat16" else {"rtol": 1e-5, "atol": 2e-5}
    )


def assert_matches_dense(op, case: Case, seed: int = 0) -> None:
    """Checks o, lse and all three reports against the slow dense computation.

    `op` is called as `op(q, layer, selection, sm_scale=…, stats=…)`.
    """
    inputs = case.build(seed)
    want = expected(inputs, case.sm_scale)

    @jax.jit
    def run(inputs):
        return [
            op(*inputs, sm_scale=case.sm_scale, stats=stats)
            for stats in (None, *get_args(StatsKind))
        ]

    plain, by_page, by_token, of_listed = run(inputs)
    close = tolerance(case)
    for out in (plain, by_page, by_token, of_listed):
        assert (out.o.dtype, out.lse.dtype) == (np.float32, np.float32)
        np.testing.assert_allclose(out.o, want.o, **close)
        np.testing.assert_allclose(out.lse, want.lse, **close)
        np.testing.assert_array_equal(np.isneginf(out.lse), np.isneginf(want.lse))
        np.testing.assert_array_equal(np.asarray(out.o)[np.isneginf(want.lse)], 0)
    assert plain.stats is None
    for out, scores in ((by_page, want.page_mass), (by_token, want.token_logits)):
        np.testing.assert_allclose(out.stats.scores, scores, **close)
        np.testing.assert_allclose(out.stats.lse, want.stats_lse, **close)
    ids, count, logits = want.listed
    np.testing.assert_array_equal(of_listed.stats.ids, ids)
    np.testing.assert_array_equal(of_listed.stats.count, count)
    np.testing.assert_allclose(of_listed.stats.logits, logits, **close)
    with np.errstate(divide="ignore"):
        lse = np.logaddexp.reduce(np.asarray(logits, np.float64), axis=-1)
    np.testing.assert_allclose(of_listed.stats.lse, lse, **close)
    assert [x.dtype for x in of_listed.stats] == [np.int32, np.int32, np.float32, np.float32]


def assert_reports_rounded_mean(op, granularity: Granularity, *, off: float = 1e-5) -> None:
    """Checks that stats are of the mean query rounded to the queries' dtype.

    A kernel uses it as an MMA operand, so that no backend may rank tokens by digits that rounding
    removes. `off` is the accepted error of sums of products.
    """
    q, layer, _ = Case("", batch=1, kv_heads=1, group=3, lengths="full", dtype="bfloat16").build(2)
    nobody = np.zeros((1, 1, 0), np.int32), np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
    ids, count, dense = map(jax.device_put, nobody)
    all_of_it = Selection(ids, count, dense=dense, granularity=granularity)
    out = jax.jit(lambda q: op(q, layer, all_of_it, stats="token_logits"))(q)
    mean = np.asarray(q, np.float32)[0].mean(0)
    rounded = mean.astype(jnp.bfloat16).astype(np.float32)
    k = np.asarray(layer.k, np.float32).reshape(-1, q.shape[-1])
    got, scale = np.asarray(out.stats.scores)[0, 0], q.shape[-1] ** -0.5
    np.testing.assert_allclose(got, scale * k @ rounded, rtol=off, atol=off)
    assert np.abs(got - scale * k @ mean).max() > max(1e-3, 2 * off)


def assert_rounds_o(op, case: Case) -> None:
    """Checks that `dtype` rounds o of float32 once, and leaves lse and stats unchanged."""
    inputs = case.build()

    @jax.jit
    def both(inputs):
        return [
            op(*inputs, stats="token_logits", dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)
        ]

    whole, rounded = both(inputs)
    assert (rounded.o.dtype, rounded.lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(np.asarray(rounded.o), np.asarray(whole.o).astype(jnp.bfloat16))
    for a, b in zip(jax.tree.leaves(rounded[1:]), jax.tree.leaves(whole[1:]), strict=True):
        np.testing.assert_array_equal(a, b)
