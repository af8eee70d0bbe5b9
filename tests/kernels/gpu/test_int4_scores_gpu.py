"""The triton backend of int4_scores against the float32 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_decode.cases import Case
from jsparse.pallas_kernels.int4_scores import int4_scores
from jsparse.pallas_kernels.int4_scores.cases import CASES, build
from jsparse.pallas_kernels.int4_scores.sidecar import Int4Keys, dequantise, quantise

pytestmark = pytest.mark.gpu
by_name = {case.name: case for case in CASES}
WHOLE = Case(
    "", head_dim=128, num_pages=70, dense="all", listed="none", capacity=0, table="scrambled", dtype="bfloat16"
)
LISTED = Case("", head_dim=128, num_pages=70, bits=True, table="scrambled", dtype="bfloat16")


def both(inputs, **kwargs):
    run = jax.jit(lambda inputs, name: int4_scores(*inputs, implementation=name, **kwargs), static_argnums=1)
    return run(inputs, "triton"), run(inputs, "reference")


def assert_near(inputs, got, want, sm_scale):
    """Every product may be off by 2^-12 of itself, what 11 bits of the query leave; masks agree exactly."""
    size = inputs._replace(
        q=jnp.abs(inputs.q.astype(jnp.float32)), keys=Int4Keys(*quantise(jnp.abs(dequantise(*inputs.keys))))
    )
    products = np.asarray(int4_scores(*size, sm_scale=sm_scale, implementation="reference"))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    assert (np.abs(np.asarray(got) - np.asarray(want))[seen] <= 2.0**-11 * products[seen] + 1e-30).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_reference(case):
    inputs = build(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    assert_near(inputs, *both(inputs, sm_scale=scale), scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e3])
def test_queries_of_any_size(dtype, size):
    inputs = build(by_name["whole_full"])
    inputs = inputs._replace(q=(inputs.q * (1.0 if dtype == "float16" else size)).astype(dtype))
    assert_near(inputs, *both(inputs, sm_scale=1.0), 1.0)


def test_queries_of_zero():
    inputs = build(by_name["whole_full"])
    got, want = both(inputs._replace(q=jnp.zeros_like(inputs.q)))
    np.testing.assert_array_equal(got, want)


def test_the_error_is_below_that_of_bfloat16():
    """Against the exact estimate, the kernel is no worse than twice a bfloat16 matmul."""
    inputs = build(WHOLE)
    got, want = both(inputs)
    rows = Int4Keys(*(pool[inputs.layer.block_table].reshape(2, 2, -1, *pool.shape[2:]) for pool in inputs.keys))
    k, q = dequantise(*rows).astype(jnp.bfloat16), inputs.q.reshape(2, 2, 4, 128)
    plain = jnp.einsum("bkgh,bksh->bkgs", q, k, preferred_element_type=jnp.float32).reshape(want.shape) * 128**-0.5
    seen = np.isfinite(want)
    off = [np.sqrt(np.mean(np.square(np.asarray(x)[seen] - np.asarray(want)[seen]))) for x in (got, plain)]
    assert off[0] <= 2 * off[1]


@pytest.mark.parametrize("case", [WHOLE, LISTED], ids=["whole", "listed"])
def test_neither_tiling_nor_batch_changes_a_bit(case):
    from jsparse.pallas_kernels.int4_scores.triton import Tiling
    from jsparse.pallas_kernels.int4_scores.triton import int4_scores as kernel

    inputs = build(case)
    tilings = (None, Tiling(64, 3, 1, 1, 2), Tiling(256, 2, 1, 4, 1), Tiling(128, 16, 1, 4, 4))
    outs = [jax.jit(lambda x, t=t: kernel(*x, sm_scale=0.1, tiling=t))(inputs) for t in tilings]
    for out in outs[1:]:
        np.testing.assert_array_equal(outs[0], out)

    def row(tree):
        return jax.tree.map(lambda x: x[1:], tree)

    q, layer, keys, selection = inputs
    assert layer.block_table is not None
    alone = layer._replace(lengths=layer.lengths[1:], block_table=layer.block_table[1:])
    out = kernel(q[1:], alone, keys, row(selection), sm_scale=0.1)
    np.testing.assert_array_equal(outs[0][1:], out)


@pytest.mark.parametrize("case", [WHOLE, LISTED], ids=["whole", "listed"])
def test_fifty_runs_give_the_same_bits(case):
    inputs = build(case)
    run = jax.jit(lambda inputs: int4_scores(*inputs, implementation="triton"))
    first = np.asarray(run(inputs))
    for _ in range(49):
        np.testing.assert_array_equal(first, run(inputs))


def test_heads_longer_than_their_room_read_nothing_else():
    """After an overflow lengths exceed the capacity; results count for nothing, but no memory beyond is read."""
    inputs = build(by_name["whole_full"])
    longer = inputs._replace(layer=inputs.layer._replace(lengths=inputs.layer.lengths + 1000))
    got = int4_scores(*longer, implementation="triton")
    np.testing.assert_array_equal(got, int4_scores(*inputs, implementation="triton"))


def test_pages_behind_the_first_four_gigabytes():
    size, head_dim, used = 16, 128, 8
    rng = np.random.default_rng(0)
    last = Int4Keys(*quantise(jnp.asarray(rng.normal(size=(used, size, head_dim)), jnp.float32)))
    q = jnp.asarray(rng.normal(size=(1, 4, head_dim)), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(used)[None, None], jnp.int32)
    lengths = jnp.full((1, 1), used * size, jnp.int32)

    def run(q, last, table, front):
        keys = Int4Keys(*(jnp.zeros((front + used, *x.shape[1:]), x.dtype).at[front:].set(x) for x in last))
        unread = jnp.zeros((front + used, size, head_dim), jnp.bfloat16)
        layer = LayerCache(unread, unread, lengths, block_table=table + front)
        return int4_scores(q, layer, keys, None, implementation="triton")

    run = jax.jit(run, static_argnums=3)
    np.testing.assert_array_equal(run(q, last, table, 2**32 // (size * head_dim // 2)), run(q, last, table, 0))
