"""Tests block_sparse_prefill's kernel against float64, and against dense attention of chunks."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import read_slots
from jsparse.pallas_kernels.block_sparse_prefill import block_sparse_prefill
from jsparse.pallas_kernels.dispatch import no_mosaic
from jsparse.runtime.chunk_attention import attend_chunk
from tests.kernels.cases.block_sparse_prefill_mosaic import CASES, Case
from tests.support.chunk_attention import attended

pytestmark = pytest.mark.gpu
attend = jax.jit(partial(block_sparse_prefill, implementation="mosaic"))


@pytest.fixture(autouse=True)
def _needs_hopper():
    if reason := no_mosaic():
        pytest.skip(reason)


LONG = Case(
    "long",
    rows=((57_003, 8192),),
    tokens=8192,
    kv_heads=8,
    group=4,
    head_dim=128,
    num_pages=4096,
    density=0.1,
)
SHAPES = [
    LONG,
    replace(LONG, name="long_identity", rows=((57_344, 8000),), table="identity", density=0.5),
    replace(
        LONG, name="everything_of_4k", rows=((0, 4096),), tokens=4096, num_pages=256, density=1
    ),
    replace(
        LONG,
        name="rows",
        rows=((3000, 500), (0, 512), (7000, 1), (0, 0)),
        tokens=512,
        num_pages=500,
        group=7,
        kv_heads=4,
        density=0.3,
    ),
    replace(LONG, name="h64", rows=((5000, 1024),), tokens=1024, num_pages=400, head_dim=64),
    replace(LONG, name="p128", rows=((5000, 1024),), tokens=1024, num_pages=50, page_size=128),
]


def assert_close(got, want, tolerance=2e-2):
    """Means over many keys are small: a missing block of a long list is an error of 1e-3."""
    size = float(np.sqrt(np.mean(want**2, dtype=np.float64))) if want.size else 0.0
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("case", [*CASES, *SHAPES], ids=str)
def test_matches_float64(case):
    """Of long chunks, the first and last queries of some blocks of some heads."""
    inputs, heads = case.build(), case.kv_heads * case.group
    o = np.asarray(attend(*inputs), np.float64)
    assert np.isfinite(o).all()
    for row, (_, valid) in enumerate(case.rows):
        few = np.linspace(0, max(valid - 1, 0), 9, dtype=int)
        edges = {*range(valid)} if valid <= 256 else {*few, 63, 64, 127, 128, valid - 2}
        tokens = sorted(token for token in edges if 0 <= token < valid)
        for head in {0, heads // 2, heads - 1}:
            want = attended(inputs, row, head, tokens)
            assert_close(o[row, tokens, head], want)
            np.testing.assert_array_equal(o[row, tokens, head][~want.any(1)], 0)


@pytest.mark.parametrize("table", ["identity", "scrambled"])
def test_every_block_is_dense_attention(table):
    case = replace(LONG, name="dense", density=1, table=table)
    q, kv, valid, chosen = case.build()
    (before, count), batch_heads = case.rows[0], kv.lengths.shape

    @jax.jit
    def dense(q, kv, valid):
        slots = jnp.broadcast_to(before + jnp.arange(count, dtype=jnp.int32), (*batch_heads, count))
        k, v = (read_slots(pool, kv, slots).swapaxes(1, 2) for pool in (kv.k, kv.v))
        return attend_chunk(q, k, v, kv, valid)

    got, want = attend(q, kv, valid), dense(q, kv, valid)
    np.testing.assert_array_equal(got, attend(q, kv, valid, chosen))
    assert_close(*(np.asarray(x, np.float32) for x in (got, want)), 1e-1)


def test_row_alone_has_the_bits_that_it_has_in_a_batch():
    inputs = next(case for case in SHAPES if case.name == "rows").build()
    q, kv, valid, chosen = inputs
    together = np.asarray(attend(*inputs), np.float32)
    for row, own in enumerate(np.asarray(valid)):
        some = slice(row, row + 1)
        alone = kv._replace(lengths=kv.lengths[some], block_table=kv.block_table[some])
        o = np.asarray(attend(q[some], alone, valid[some], chosen[some]), np.float32)
        np.testing.assert_array_equal(o[0, :own], together[row, :own])


def test_repeated_calls_give_the_same_bits():
    """Missing synchronisation would show sooner or later."""
    inputs = LONG.build()
    first = np.asarray(attend(*inputs), np.float32)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(attend(*inputs), np.float32), first)
