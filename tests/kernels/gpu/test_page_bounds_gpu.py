"""The triton backend of page_bounds against the float32 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_decode.cases import Case
from jsparse.pallas_kernels.page_bounds import page_bounds
from jsparse.pallas_kernels.page_bounds.cases import CASES, build
from jsparse.pallas_kernels.page_bounds.sidecar import PageBounds

pytestmark = pytest.mark.gpu
by_name = {case.name: case for case in CASES}
LARGE = Case(
    "", head_dim=128, num_pages=300, dense="all", listed="none", capacity=0, table="scrambled", dtype="bfloat16"
)


def both(inputs, **kwargs):
    run = jax.jit(lambda inputs, name: page_bounds(*inputs, implementation=name, **kwargs), static_argnums=1)
    return run(inputs, "triton"), run(inputs, "reference")


def assert_near(inputs, got, want, sm_scale):
    """Products are exact and summed in float32; masks agree exactly."""
    bounds = PageBounds(*(jnp.abs(x) for x in inputs.bounds))
    size = np.asarray(page_bounds(jnp.abs(inputs.q), inputs.layer, bounds, sm_scale=sm_scale))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    assert (np.abs(np.asarray(got) - np.asarray(want))[seen] <= 2.0**-18 * size[seen] + 1e-30).all()


@pytest.mark.parametrize("case", [*CASES, LARGE], ids=lambda case: case.name)
def test_matches_the_reference(case):
    inputs = build(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    assert_near(inputs, *both(inputs, sm_scale=scale), scale)


@pytest.mark.parametrize("name", ["ragged", "full", "head_dim_96", "head_dim_256", "group_of_7"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matches_the_reference_in_half_precision(name, dtype):
    q, layer, bounds = build(by_name[name])
    inputs = build(by_name[name])._replace(
        q=q.astype(dtype),
        layer=layer._replace(k=jnp.zeros_like(layer.k, dtype), v=jnp.zeros_like(layer.v, dtype)),
        bounds=PageBounds(*(jnp.clip(x, -6e4, 6e4).astype(dtype) for x in bounds)),
    )
    assert_near(inputs, *both(inputs, sm_scale=1.0), 1.0)


def test_neither_tiling_nor_batch_changes_a_bit():
    from jsparse.pallas_kernels.page_bounds.triton import Tiling
    from jsparse.pallas_kernels.page_bounds.triton import page_bounds as kernel

    q, layer, bounds = inputs = build(LARGE)
    tilings = (None, Tiling(16, 3, 1, 1, 2), Tiling(64, 2, 1, 4, 1), Tiling(32, 16, 1, 2, 4))
    outs = [jax.jit(lambda x, t=t: kernel(*x, sm_scale=0.1, tiling=t))(inputs) for t in tilings]
    for out in outs[1:]:
        np.testing.assert_array_equal(outs[0], out)
    assert layer.block_table is not None
    alone = layer._replace(lengths=layer.lengths[1:], block_table=layer.block_table[1:])
    np.testing.assert_array_equal(outs[0][1:], kernel(q[1:], alone, bounds, sm_scale=0.1))


def test_fifty_runs_give_the_same_bits():
    inputs = build(LARGE)
    run = jax.jit(lambda inputs: page_bounds(*inputs, implementation="triton"))
    first = np.asarray(run(inputs))
    for _ in range(49):
        np.testing.assert_array_equal(first, run(inputs))


def test_heads_longer_than_their_room_read_nothing_else():
    """After an overflow lengths exceed the capacity; results count for nothing, but no memory beyond is read."""
    inputs = build(by_name["full"])
    longer = inputs._replace(layer=inputs.layer._replace(lengths=inputs.layer.lengths + 1000))
    got = page_bounds(*longer, implementation="triton")
    np.testing.assert_array_equal(got, page_bounds(*inputs, implementation="triton"))


def test_bounds_behind_the_first_two_billion_values():
    head_dim, used = 128, 40
    rng = np.random.default_rng(0)
    last = jnp.asarray(rng.normal(size=(used, head_dim)), jnp.bfloat16)
    q = jnp.asarray(rng.normal(size=(1, 4, head_dim)), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(used)[None, None], jnp.int32)
    lengths = jnp.full((1, 1), used * 16, jnp.int32)

    def run(q, last, table, front):
        pool = jnp.zeros((front + used, head_dim), last.dtype).at[front:].set(last)
        unread = jnp.zeros((front + used, 16, head_dim), last.dtype)
        layer = LayerCache(unread, unread, lengths, block_table=table + front)
        return page_bounds(q, layer, PageBounds(pool, pool), implementation="triton")

    run = jax.jit(run, static_argnums=3)
    np.testing.assert_array_equal(run(q, last, table, 2**31 // head_dim), run(q, last, table, 0))
