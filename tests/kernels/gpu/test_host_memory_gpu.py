"""Tests on a GPU the ops that read and write K and V in host memory, against device memory."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.host_memory.pages import host_sharding
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.key_bounds import PageBounds
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.pallas_kernels.row_scatter import row_scatter
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.runtime import host_attention
from tests.kernels.cases import row_gather as gather_cases
from tests.kernels.cases.block_sparse_decode import Case
from tests.kernels.cases.row_scatter import CASES
from tests.kernels.cases.row_scatter import Case as RowCase
from tests.support.host_layers import in_host_memory, lent, on_host

pytestmark = pytest.mark.gpu
MANY = RowCase("many", rows=5000, width=(16, 128), lists=(8, 70), dtype="bfloat16")
TOKENS = partial(Case, granularity="token", dtype="bfloat16", head_dim=128, num_pages=40)
PAGES = partial(Case, dtype="bfloat16", head_dim=128, num_pages=40)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", [*gather_cases.CASES], ids=str)
def test_rows_are_read_from_host_memory(case):
    pool, ids, count = case.build()
    gather = jax.jit(row_gather, static_argnames="implementation")
    got = gather(on_host(pool), ids, count, implementation="triton")
    assert got.sharding.memory_kind == "device"
    np.testing.assert_array_equal(got, gather(pool, ids, count, implementation="reference"))


def test_pool_in_host_memory_is_not_copied():
    """The program's temporary memory is smaller than the pool."""
    pool, ids = on_host(jnp.zeros((1 << 16, 256), jnp.bfloat16)), jnp.arange(64, dtype=jnp.int32)
    gather = jax.jit(partial(row_gather, implementation="triton"))
    memory = gather.lower(pool, ids).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < pool.nbytes // 10


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("case", [*CASES, MANY], ids=str)
def test_rows_are_written_to_host_memory(case, implementation):
    inputs = case.build()
    want = row_scatter(*inputs, implementation="reference")
    put = jax.jit(
        partial(row_scatter, implementation=implementation),
        donate_argnums=0,
        out_shardings=host_sharding(),
    )
    got = put(on_host(inputs.pool), *inputs[1:])
    assert got.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(got, want)


def test_host_memory_is_written_in_place():
    pool = on_host(jnp.zeros((1 << 14, 16, 128), jnp.bfloat16))
    ids, rows = jnp.array([3], jnp.int32), jnp.ones((1, 16, 128), jnp.bfloat16)
    put = jax.jit(row_scatter, donate_argnums=0, out_shardings=host_sharding())
    memory = put.lower(pool, ids, rows).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < pool.nbytes // 10
    got = put(pool, ids, rows)
    assert pool.is_deleted()
    assert float(jnp.sum(jax.device_put(got, jax.memory.Space.Device))) == 16 * 128


@pytest.mark.parametrize("stats", [None, "listed_logits"])
@pytest.mark.parametrize("heads", [(), (1,)])
@pytest.mark.parametrize(
    "case",
    [
        TOKENS("some"),
        TOKENS("all", listed="all"),
        TOKENS("newest", listed="newest"),
        TOKENS("none", listed="none"),
        TOKENS("mixed", dense="mixed"),
        TOKENS("float32", dtype="float32", head_dim=64),
        TOKENS("int8", int8=True),
        TOKENS("int8_mixed", int8=True, dense="mixed"),
    ],
    ids=str,
)
def test_tokens_are_read_in_place(case, heads, stats):
    q, layer, selection = case.build()
    tailed, pages = in_host_memory(layer, 4, heads)

    @jax.jit
    def attend(layer, pages):
        if pages is not None:
            layer = lent(layer, pages)
        return token_sparse_decode(q, layer, selection, stats=stats, implementation="triton")

    same(attend(tailed, pages), attend(layer, None))


@pytest.mark.parametrize(
    "case",
    [
        PAGES("some"),
        PAGES("first", listed="first"),
        PAGES("bits", bits=True),
        PAGES("mixed", dense="mixed"),
        PAGES("all", listed="all"),
        PAGES("int8", int8=True),
    ],
    ids=str,
)
def test_pages_are_gathered(case):
    q, layer, selection = case.build()
    tailed, pages = in_host_memory(layer, 4, (1,))

    @jax.jit
    def attend(layer, pages):
        return host_attention.attend(
            block_sparse_decode, q, lent(layer, pages), selection, stats=None, dtype=jnp.float32
        )

    near(attend(tailed, pages), jax.jit(block_sparse_decode)(q, layer, selection))


def near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def test_bounds_include_the_tokens_of_the_tail():
    _, layer, _ = PAGES("full", lengths="full").build()
    layer = layer._replace(lengths=layer.lengths - 5)
    tailed, _ = in_host_memory(layer, 4)
    zeros = jnp.zeros((layer.k.shape[0], layer.k.shape[2]), layer.k.dtype)
    one = jnp.ones(layer.lengths.shape[0], jnp.int32)
    run = jax.jit(partial(bounds_append, max_new=1, implementation="triton"))
    got, want = (
        run(PageBounds(zeros, zeros), held, one, held.lengths - 1) for held in (tailed, layer)
    )
    same(got, want)
    assert float(jnp.abs(want.low).max()) > 0


def test_attention_makes_no_copy_of_host_memory():
    case = replace(TOKENS("long"), num_pages=4096, lengths="full", capacity=128)
    q, layer, selection = case.build()
    tailed, pages = in_host_memory(layer, 4)

    @jax.jit
    def attend(layer, pages):
        return token_sparse_decode(q, lent(layer, pages), selection)

    memory = attend.lower(tailed, pages).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < layer.k.nbytes // 10
