"""Tests row_gather against numpy, from device memory and from host memory."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jsparse.pallas_kernels.row_gather import row_gather
from tests.kernels.cases.row_gather import CASES, Case
from tests.support.marks import slow_except_named

SOME = ("rows", "all_of_them", "nothing_wanted", "far_ids", "empty_lists", "pages_of_96", "uint32")
gather = jax.jit(row_gather, static_argnames="row_axes")


def expected(pool, ids, count):
    """Gathers the listed rows one by one."""
    rows = np.zeros((*ids.shape, *pool.shape[1:]), pool.dtype)
    for at in np.ndindex(*ids.shape):
        if count is None or at[-1] < count[at[:-1]]:
            rows[at] = pool[ids[at]]
    return rows


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
def test_rows_are_those_listed(case):
    inputs = case.build()
    got = gather(*inputs)
    assert got.dtype == inputs.pool.dtype
    np.testing.assert_array_equal(
        got, expected(*(x if x is None else np.asarray(x) for x in inputs))
    )


def test_negative_ids_give_zeros_and_large_ids_the_last_row():
    pool = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(
        gather(pool, np.array([-1, 99, 1], np.int32)), [[0, 0], [4, 5], [2, 3]]
    )


def test_row_index_may_span_two_axes():
    pool = np.arange(12.0, dtype=np.float32).reshape(2, 3, 2)
    ids = np.array([[4, -2], [0, 5]], np.int32)
    count = np.array([2, 1], np.int32)
    np.testing.assert_array_equal(
        gather(pool, ids, count, row_axes=2), [[[8, 9], [0, 0]], [[0, 1], [0, 0]]]
    )


def test_pool_in_host_memory_gives_rows_on_the_device():
    pool, ids, count = Case("").build()
    device = jax.devices()[0]
    host = jax.device_put(pool, SingleDeviceSharding(device, memory_kind="pinned_host"))
    got = gather(host, ids, count)
    assert got.sharding.memory_kind == "device"
    np.testing.assert_array_equal(got, gather(pool, ids, count))


def test_dtype_without_a_kernel_uses_the_reference():
    pool = np.array([[True, False], [False, True]])
    np.testing.assert_array_equal(gather(pool, np.array([1], np.int32)), pool[1:])
    with pytest.raises(ValueError, match="row_gather on this backend takes .*, not bool"):
        row_gather(pool, np.array([1], np.int32), implementation="triton")


def test_wrong_calls_are_refused():
    rows, ids = np.zeros((4, 2), np.float32), np.zeros((3, 5), np.int32)
    for pool, row_axes, message in (
        (rows[:, 0], 1, r"pool.shape=\(4,\): must be \[rows, W\]"),
        (rows[:0], 1, r"pool.shape=\(0, 2\): must have a row"),
        (rows, 3, r"row_axes=3: must be from 1 to the axes of \(4, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            row_gather(pool, ids, row_axes=row_axes)
