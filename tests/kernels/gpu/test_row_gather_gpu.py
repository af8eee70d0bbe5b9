"""Tests that row_gather in triton does bit for bit what the reference does.

The pool lies in the device's memory or in the host's.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jsparse.pallas_kernels.row_gather import row_gather
from tests.kernels.cases.row_gather import CASES, Case

pytestmark = pytest.mark.gpu
MANY = Case("many", rows=5000, width=(16, 128), lists=(8, 8), capacity=70, dtype="bfloat16")
LONG = Case("long", rows=300, width=(5000,), lists=(), capacity=100, count="all")


@partial(jax.jit, static_argnames="implementation")
def gather(pool, ids, count, implementation="triton"):
    return row_gather(pool, ids, count, implementation=implementation)


def on_host(pool):
    return jax.device_put(pool, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("case", [*CASES, MANY, LONG], ids=str)
def test_does_what_the_reference_does(case, memory):
    pool, ids, count = case.build()
    got = gather(on_host(pool) if memory == "pinned_host" else pool, ids, count)
    want = gather(pool, ids, count, "reference")
    assert got.dtype == want.dtype and got.sharding.memory_kind == "device"
    np.testing.assert_array_equal(got, want)


def test_a_pool_in_host_memory_is_not_copied():
    """The program takes less memory for itself than the pool does."""
    pool = on_host(jnp.zeros((1 << 16, 256), jnp.bfloat16))
    ids = jnp.arange(64, dtype=jnp.int32)
    memory = gather.lower(pool, ids, None).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < pool.nbytes // 10
    assert row_gather(pool, ids, implementation="triton").sharding.memory_kind == "device"


def test_negative_ids_give_zeros_and_large_ones_the_last_row():
    pool = jnp.arange(6.0).reshape(3, 2)
    got = gather(on_host(pool), jnp.array([-1, 99, 1], jnp.int32), None)
    np.testing.assert_array_equal(got, [[0, 0], [4, 5], [2, 3]])


def test_rows_beyond_two_to_the_31_elements():
    pool = jnp.zeros((70000, 32768), jnp.int8).at[69999].set(7)
    got = gather(pool, jnp.array([0, 69999], jnp.int32), None)
    np.testing.assert_array_equal(got[:, 5], [0, 7])


def test_what_follows_in_the_same_program_sees_the_rows():
    pool, ids, _ = MANY.build()

    @jax.jit
    def total(pool, ids):
        for _ in range(5):
            rows = row_gather(pool, ids, implementation="triton")
            ids = (ids + rows.astype(jnp.int32).sum((-1, -2))) % pool.shape[0]
        return ids

    @jax.jit
    def plain(pool, ids):
        for _ in range(5):
            ids = (ids + pool[ids].astype(jnp.int32).sum((-1, -2))) % pool.shape[0]
        return ids

    np.testing.assert_array_equal(total(on_host(pool), ids), plain(pool, ids))
