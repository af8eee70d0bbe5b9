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
def test_rows_are_written_where_ids_say(case):
    inputs = case.build()
    pool, ids, rows = map(np.asarray, inputs)
    want = np.array(pool)
    for at in np.ndindex(*ids.shape):
        if 0 <= ids[at] < case.rows:
            want[ids[at]] = rows[at]
    got = scatter(*inputs)
    assert got.dtype == pool.dtype
    np.testing.assert_array_equal(got, want)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        pool, ids, _ = case.build(3)
        assert pool.shape == (case.rows, *case.width)
        assert ids.shape == case.lists
        named = np.asarray(ids)[(np.asarray(ids) >= 0) & (np.asarray(ids) < case.rows)]
        assert len({*named.tolist()}) == named.size
    ids = np.asarray(CASES[0].build().ids)
    assert (ids < 0).any()
    assert (ids >= 50).any()


def zeros(*shape, dtype=np.float32):
    return jax.device_put(np.zeros(shape, dtype))


POOL, IDS, ROWS = zeros(4, 2), zeros(3, dtype=np.int32), zeros(3, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((zeros(4), IDS, ROWS), {}, r"pool.shape=\(4,\): must be \[rows, W\]"),
        ((POOL, zeros(3, dtype=np.int16), ROWS), {}, r"ids=int16\[3\]: must be int32"),
        (
            (POOL, IDS, zeros(2, 2)),
            {},
            r"rows.shape=\(2, 2\): must be \(3, 2\)",
        ),
        (
            (POOL, IDS, zeros(3, 2, dtype=np.int8)),
            {},
            "rows.dtype=int8: must be that of pool",
        ),
        ((POOL, IDS, ROWS), {"implementation": "abacus"}, "'abacus': row_scatter has"),
    ],
)
def test_wrong_calls_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        row_scatter(*args, **kwargs)


def test_a_type_that_no_kernel_copies_is_the_references():
    pool, rows = zeros(3, 2, dtype=bool), np.ones((1, 2), bool)
    got = scatter(pool, np.array([1], np.int32), rows)
    np.testing.assert_array_equal(got, [[0, 0], [1, 1], [0, 0]])
    with pytest.raises(ValueError, match="row_scatter on this backend takes .*, not bool"):
        row_scatter(pool, zeros(1, dtype=np.int32), rows, implementation="triton")
