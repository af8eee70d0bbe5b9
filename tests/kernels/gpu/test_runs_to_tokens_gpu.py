"""Tests that runs_to_tokens in triton lists what the reference lists."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from tests.kernels.cases.runs_to_tokens import CASES, Case

pytestmark = pytest.mark.gpu
LARGE = (
    Case("large", batch=1, kv_heads=8, runs=13108, listed=130, like="one_long", capacity=1024),
    Case("large_shared", batch=8, kv_heads=8, runs=13108, listed=130, shared=True, capacity=1024),
    Case("large_all", batch=2, kv_heads=4, runs=9000, listed=9000, count="all", like="mixed"),
    Case("large_outside", 8, 8, runs=13108, listed=128, shared=True, outside=True),
    Case("large_long", kv_heads=2, runs=700, listed=600, like="mixed", long=9000, capacity=100_000),
)


@partial(jax.jit, static_argnames=("capacity", "implementation"))
def listed(*arrays, capacity, implementation="triton"):
    return runs_to_tokens(*arrays, capacity=capacity, implementation=implementation)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_lists_what_the_reference_lists(case, seed):
    inputs, capacity = case.build(seed)
    want = listed(*inputs, capacity=capacity, implementation="reference")
    assert_same(listed(*inputs, capacity=capacity), want)


@pytest.mark.parametrize("block", [16, 64, 1024])
def test_blocks_of_any_size(block, monkeypatch):
    from jsparse.pallas_kernels.runs_to_tokens import triton_gpu

    monkeypatch.setattr(triton_gpu, "BLOCK", block)
    monkeypatch.setattr(triton_gpu, "ZEROS", block)
    monkeypatch.setattr(triton_gpu, "NUM_WARPS", 2)
    for case in (*LARGE[:2], LARGE[-1], *CASES[-3:]):
        inputs, capacity = case.build(4)
        want = listed(*inputs, capacity=capacity, implementation="reference")
        run = partial(triton_gpu.runs_to_tokens, capacity=capacity)
        assert_same(jax.jit(run)(*inputs), want)


def test_a_head_alone_lists_what_it_lists_in_a_batch():
    inputs, capacity = LARGE[3].build()
    together = listed(*inputs, capacity=capacity)
    alone = listed(*jax.tree.map(lambda x: x[5:6], inputs), capacity=capacity)
    assert_same(alone, jax.tree.map(lambda x: x[5:6], together))


def test_lists_beyond_two_to_the_31_entries():
    pairs, capacity = 17, 1 << 27
    ids = jnp.zeros((1, pairs, 1), jnp.int32)
    edges = jnp.array([[[5, 8]]], jnp.int32)

    @jax.jit
    def ends():
        one = jnp.ones((1, pairs), jnp.int32)
        got = runs_to_tokens(ids, one, edges, capacity=capacity, implementation="triton")
        return got.ids[0, -1, :5], got.ids[0, :, -1], got.count

    first, last, count = ends()
    np.testing.assert_array_equal(first, [5, 6, 7, 0, 0])
    assert not np.asarray(last).any()
    np.testing.assert_array_equal(count, np.full((1, pairs), 3))
