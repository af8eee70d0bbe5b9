"""Tests the Mosaic GPU kernel on any machine: its body is interpreted, its code lowered for CUDA.

Its lists are compared with the definition.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_prefill import mosaic
from jsparse.pallas_kernels.block_sparse_prefill.api import BACKENDS
from jsparse.pallas_kernels.block_sparse_prefill.lists import Unit, lists
from tests.kernels.cases.block_sparse_prefill_mosaic import BLOCK, CASES, Case
from tests.support.chunk_attention import attended
from tests.support.marks import slow_except, slow_except_named

interpreted = jax.jit(partial(mosaic.block_sparse_prefill, interpret=True))


@pytest.mark.parametrize("case", slow_except_named(CASES, "unaligned", "few", "identity"), ids=str)
def test_interpreted_body_attends_to_chosen_blocks(case, capsys):
    inputs = case.build()
    o, nothing = np.asarray(interpreted(*inputs), np.float64), False
    for row, (_, valid) in enumerate(case.rows):
        for head in range(case.kv_heads * case.group):
            want = attended(inputs, row, head, range(valid))
            np.testing.assert_allclose(o[row, :valid, head], want, rtol=2e-2, atol=2e-2)
            np.testing.assert_array_equal(o[row, :valid, head][~want.any(1)], 0)
            nothing |= bool((~want.any(1)).any())
    assert nothing or case.name != "identity", "every query has a key"
    assert np.isfinite(o).all()
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("case", slow_except_named(CASES, "few"), ids=str)
def test_interpreted_body_attends_to_all_without_a_choice(case):
    """The same blocks in the same order, so the same bits."""
    q, kv, valid, chosen = case.build()
    every = interpreted(q, kv, valid, jnp.ones_like(chosen))
    np.testing.assert_array_equal(interpreted(q, kv, valid), every)


def test_lists_have_the_reached_blocks_in_ascending_order():
    rows = (200, 190), (0, 256), (0, 0), (310, 2)
    inputs = Case("", rows=rows, tokens=256, num_pages=25).build(1)
    _, kv, valid, chosen = inputs
    names = ("heads", "query_blocks", "key_blocks")
    of = jax.jit(partial(lists, **dict(zip(names, chosen.shape[1:], strict=True))))
    made, every, without = (
        of(marks, kv.lengths[:, 0], valid) for marks in (chosen, jnp.ones_like(chosen), None)
    )
    np.testing.assert_array_equal(without.units, every.units)
    first = np.arange(chosen.shape[3]) < every.units[:, Unit._fields.index("blocks")][:, None]
    np.testing.assert_array_equal(np.where(first, without.ids, 0), every.ids)
    units, sums = [Unit(*unit) for unit in made.units.tolist()], np.zeros(chosen.shape[:2], int)
    for unit, ids in zip(units, made.ids, strict=True):
        before, held = int(kv.lengths[unit.row, 0] - valid[unit.row]), int(valid[unit.row])
        own = [before + t for t in range(held)][unit.token : unit.token + BLOCK]
        marked = np.flatnonzero(chosen[unit.row, unit.head, unit.token // BLOCK])
        blocks = [at for at in marked.tolist() if own and at * BLOCK <= own[-1]]
        assert ids[: len(blocks)].tolist() == blocks
        assert (unit.first, unit.blocks) == (before + unit.token, max(len(blocks), 1))
        assert unit.newest == (before + held - 1 if blocks else -1)
        sums[unit.row, unit.head] += len(blocks)
    places = [(unit.row, unit.head, unit.token // BLOCK) for unit in units]
    assert sorted(places) == list(np.ndindex(*chosen.shape[:3]))
    assert (np.diff([sums[place[:2]] for place in places]) <= 0).all(), "a longer head starts later"
    assert [block for _, _, block in places] == [1, 0] * sums.size


SIZES = [(128, 16, True, 8192), (128, 16, False, 200), (64, 128, True, 512), (64, 8, True, 64)]


@pytest.mark.parametrize("sizes", slow_except(SIZES, SIZES[0]), ids=str)
def test_lowers_for_cuda(sizes):
    """Lowering checks layouts, alignment and shared memory, and needs no GPU."""
    head_dim, page_size, mapped, tokens = sizes
    batch, heads, group, pages = 2, 2, 4, 150
    spec, of_type = jax.ShapeDtypeStruct, jnp.float16 if head_dim == 64 else jnp.bfloat16
    pool = spec((batch * heads * pages, page_size, head_dim), of_type)
    table = spec((batch, heads, pages), jnp.int32) if mapped else None
    kv = LayerCache(pool, pool, spec((batch, heads), jnp.int32), table)
    q = spec((batch, tokens, heads * group, head_dim), of_type)
    blocks = -(-tokens // BLOCK), -(-pages * page_size // BLOCK)
    chosen = spec((batch, heads * group, *blocks), jnp.bool_)
    for choice in (chosen, None):
        traced = jax.jit(mosaic.block_sparse_prefill).trace(
            q, kv, spec((batch,), jnp.int32), choice
        )
        assert "block_sparse_prefill" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_refusals_name_the_reason():
    q, kv, valid, chosen = Case("").build()
    kernel = next(backend for backend in BACKENDS if backend.name == "mosaic")
    for change, reason in (
        ({"q": q.astype(jnp.float32)}, "takes bfloat16 or float16, not float32"),
        ({"kv": kv._replace(bias=jnp.zeros(kv.k.shape[:2]))}, "without a bias"),
        ({"q": q[..., :32]}, "head dimensions 64 and 128, not 32"),
        ({}, "needs an NVIDIA GPU"),
    ):
        given = {"q": q, "kv": kv, **change}
        assert reason in str(kernel.refusal(given["q"], given["kv"], valid, chosen))
