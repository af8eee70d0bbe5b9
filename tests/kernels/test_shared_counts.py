"""Tests shared_counts' reference against assigning scores one by one, and its refusals."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.pallas_kernels.shared_counts import shared_counts
from jsparse.pallas_kernels.shared_counts.api import BACKENDS
from tests.kernels.cases.shared_counts import CASES, LARGE
from tests.support.marks import slow_except_named

counts = jax.jit(shared_counts, static_argnames=("min_count", "max_count", "implementation"))
# several cases of a shape share a program
SOME = (
    "shares",
    "ties",
    "zeros",
    "equal",
    "absent",
    "an_empty_list",
    "floors_are_more_than_all",
    "caps_are_less_than_all",
    "bfloat16",
    "odd_slots",
)
finite_or_not = st.sampled_from([-np.inf, -1.0, 0.0, -0.0, 0.25, 0.5, np.inf, np.nan]) | st.floats(
    -100, 100, width=32, allow_subnormal=False
)


def one_by_one(lists, total, min_count, max_count):
    """Assigns scores: first to each list up to its floor, then to the list with the best next
    score.
    """
    best = [sorted((x for x in scores if x > -np.inf), reverse=True) for scores in lists]
    given = [min(min_count, len(scores)) for scores in best]
    caps = [min(max_count, len(scores)) for scores in best]
    while sum(given) < total:
        following = [(-best[i][n], i) for i, n in enumerate(given) if n < caps[i]]
        if not following:
            break
        given[min(following)[1]] += 1
    return given


def check(scores, total, bounds):
    got = counts(np.asarray(scores), np.asarray(total, np.int32), **bounds)
    assert got.dtype == np.int32
    want = [
        one_by_one(np.asarray(lists, np.float32), n, **bounds)
        for lists, n in zip(scores, total, strict=True)
    ]
    np.testing.assert_array_equal(got, want)


@settings(max_examples=150)
@given(
    st.lists(st.lists(finite_or_not, min_size=5, max_size=5), min_size=6, max_size=6),
    st.lists(st.integers(0, 18), min_size=2, max_size=2),
    st.sampled_from([(0, 9), (1, 3), (3, 5), (6, 9)]),
)
def test_lists_get_the_best_scores(rows, total, bounds):
    """Two rows of three lists of 5; with ties, floors and caps, and lists with fewer finite scores
    than the floor.
    """
    scores = np.array(rows, np.float32).reshape(2, 3, 5)
    check(scores, total, dict(zip(("min_count", "max_count"), bounds, strict=True)))


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
def test_cases(case):
    check(*jax.device_get(case.build()), case.bounds)


def test_ties_go_to_the_first_list():
    scores = np.ones((1, 3, 4), np.float32)
    for total, want in ((5, [3, 1, 1]), (7, [4, 2, 1]), (12, [4, 4, 4]), (2, [1, 1, 1])):
        np.testing.assert_array_equal(
            counts(scores, np.array([total]), min_count=1, max_count=9)[0], want
        )


def test_kernel_supports_the_shapes_of_compressions():
    (refusal,) = (backend.refusal for backend in BACKENDS if backend.name == "triton")
    for case in (*CASES, *LARGE):
        assert "takes" not in (refusal(*case.build(), **case.bounds) or "")


def test_wrong_calls_are_refused():
    for minimum in (-1, 10):
        message = f"min_count={minimum}: must be at least 0 and at most max_count=9"
        with pytest.raises(ValueError, match=message):
            shared_counts(*CASES[0].build(), min_count=minimum, max_count=9)


def test_kernel_refuses_shapes_that_exceed_registers():
    for shape, reason in (
        ((1, 17, 8), "takes at most 16 lists, not 17"),
        ((1, 1, 4097), "takes lists of at most 4096 scores, not 4097"),
        ((1, 9, 2305), "takes at most 36864 scores per row, not 16 lists of 2305"),
    ):
        given = np.zeros(shape, np.float32), np.zeros(1, np.int32)
        with pytest.raises(ValueError, match=reason):
            shared_counts(*given, min_count=0, max_count=9, implementation="triton")
