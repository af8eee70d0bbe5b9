"""Tests row_scatter against numpy."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.row_scatter import row_scatter
from tests.kernels.cases.row_scatter import CASES
from tests.support.marks import slow_except_named

scatter = jax.jit(row_scatter)


@pytest.mark.parametrize(
    "case",
    slow_except_named(CASES, "rows", "one_list", "nothing_written", "no_rows", "pages_of_96"),
    ids=str,
)
def test_rows_are_written_to_their_ids(case):
    inputs = case.build()
    pool, ids, rows = map(np.asarray, inputs)
    want = np.array(pool)
    for at in np.ndindex(*ids.shape):
        if 0 <= ids[at] < case.rows:
            want[ids[at]] = rows[at]
    got = scatter(*inputs)
    assert got.dtype == pool.dtype
    np.testing.assert_array_equal(got, want)


def test_dtype_without_a_kernel_uses_the_reference():
    pool, rows = np.zeros((3, 2), bool), np.ones((1, 2), bool)
    got = scatter(pool, np.array([1], np.int32), rows)
    np.testing.assert_array_equal(got, [[0, 0], [1, 1], [0, 0]])
    with pytest.raises(ValueError, match="row_scatter on this backend takes .*, not bool"):
        row_scatter(pool, np.zeros(1, np.int32), rows, implementation="triton")


def test_wrong_calls_are_refused():
    four, three, ids = np.zeros((4, 2)), np.zeros((3, 2)), np.zeros(3, np.int32)
    for pool, rows, message in (
        (four[:, 0], three, r"pool.shape=\(4,\): must be \[rows, W\]"),
        (four, three[:2], r"rows.shape=\(2, 2\): must be \(3, 2\)"),
        (four, three.astype(np.int8), "rows.dtype=int8: must be that of pool"),
    ):
        with pytest.raises(ValueError, match=message):
            row_scatter(pool, ids, rows)
