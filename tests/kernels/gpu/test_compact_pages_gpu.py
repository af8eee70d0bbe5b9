"""Tests that compact_pages on the GPU does bit for bit what the reference does, in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.compact_pages import compact_pages, reference
from jsparse.selection import Selection
from tests.kernels.cases.compact_pages import CASES, Case

pytestmark = pytest.mark.gpu
ON_GPU = partial(compact_pages, implementation="triton")


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("donate", [False, True], ids=["copied", "in_place"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_does_what_the_reference_does(case, donate):
    layer, keep, rewrite = case.build()
    want = jax.jit(partial(compact_pages, implementation="reference"))(layer, keep, rewrite=rewrite)
    before = jax.tree.map(jnp.copy, layer)
    got = jax.jit(ON_GPU, donate_argnums=(0,) if donate else ())(layer, keep, rewrite=rewrite)
    assert_same(got, want)
    if not donate:
        assert_same(layer, before)


def test_in_place_needs_no_second_pool():
    case = Case("", batch=1, num_pages=4096, head_dim=128, dtype="bfloat16", lengths="full")
    layer, keep, _ = case.build()
    memory = jax.jit(ON_GPU, donate_argnums=0).lower(layer, keep).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= layer.k.nbytes + layer.v.nbytes
    assert memory.temp_size_in_bytes < layer.k.nbytes // 4


@pytest.mark.parametrize("kept", ["but_first", "last", "some"])
def test_rows_that_overlap_their_goals_are_never_lost(kept):
    """Fifty runs over many chunks, each written over rows just read, give the same bits."""
    case = Case(
        "",
        batch=2,
        kv_heads=8,
        num_pages=512,
        head_dim=128,
        dtype="bfloat16",
        lengths="full",
        kept=kept,
    )
    layer, keep, _ = case.build()
    want = jax.jit(partial(compact_pages, implementation="reference"))(layer, keep)
    run = jax.jit(ON_GPU, donate_argnums=0)
    same = jax.jit(
        lambda a, b: jnp.all(a.k == b.k) & jnp.all(a.v == b.v) & jnp.all(a.lengths == b.lengths)
    )
    for _ in range(50):
        assert bool(same(run(jax.tree.map(jnp.copy, layer), keep), want))


@pytest.mark.parametrize("tiling", [(64, 32, 4), (128, 256, 8), (256, 128, 4), (256, 256, 16)])
def test_strips_of_any_shape(tiling):
    from jsparse.pallas_kernels.compact_pages.triton_gpu import CompactTiling, move_rows

    for case in CASES:
        layer, keep, _ = case.build()
        got = jax.jit(partial(move_rows, tiling=CompactTiling(*tiling)))(
            layer, keep.ids, keep.count
        )
        assert_same(got, jax.jit(reference.move_rows)(layer, keep.ids, keep.count))


def test_a_head_does_not_depend_on_the_others():
    layer, keep, _ = Case(
        "", batch=4, kv_heads=4, num_pages=64, head_dim=128, dtype="bfloat16"
    ).build()
    whole = jax.jit(ON_GPU)(layer, keep)
    k, v = (pool[: 64 * 4] for pool in layer.arrays)
    one = LayerCache(k=k, v=v, lengths=layer.lengths[:1])
    alone = jax.jit(ON_GPU)(one, Selection(keep.ids[:1], keep.count[:1], granularity="token"))
    np.testing.assert_array_equal(np.asarray(alone.k), np.asarray(whole.k[: 64 * 4]))
    np.testing.assert_array_equal(np.asarray(alone.v), np.asarray(whole.v[: 64 * 4]))


@pytest.mark.parametrize("paged", [False, True], ids=["identity", "table"])
def test_pools_of_more_than_2_to_the_31_elements(paged):
    page_size, head_dim, num_pages = 64, 256, 2**16 + 64
    shape = (2 * num_pages, page_size, head_dim)
    assert np.prod(shape) > 2**31
    slot = num_pages * page_size - 1  # the very last row of the second head
    numbers = jnp.arange(1, head_dim + 1, dtype=jnp.bfloat16)
    pool = jax.jit(lambda: jnp.zeros(shape, jnp.bfloat16).at[-1, -1].set(numbers))()
    table = jnp.arange(2 * num_pages, dtype=jnp.int32).reshape(1, 2, num_pages) if paged else None
    layer = LayerCache(pool, -pool, jnp.full((1, 2), slot + 1, jnp.int32), table)
    keep = Selection(
        jnp.full((1, 2, 1), slot, jnp.int32), jnp.array([[0, 1]], jnp.int32), granularity="token"
    )
    del pool
    out = jax.jit(ON_GPU, donate_argnums=0)(layer, keep)
    np.testing.assert_array_equal(np.asarray(out.k[num_pages, 0]), np.asarray(numbers))
    np.testing.assert_array_equal(np.asarray(out.v[num_pages, 0]), -np.asarray(numbers))
    assert int(jnp.count_nonzero(out.k)) == 2 * head_dim
    np.testing.assert_array_equal(out.lengths, [[0, 1]])
