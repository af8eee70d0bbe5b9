"""Tests that table_candidates on a GPU lists, entry by entry, what the reference lists."""

from functools import partial

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.table_candidates import table_candidates
from tests.kernels.cases.table_candidates import CASES, Case

pytestmark = pytest.mark.gpu
LARGE = (
    Case("large_past", batch=1, kv_heads=8, slots=131072, number=0.04),
    Case("large_ragged", batch=8, kv_heads=8, slots=32768, number=0.04, ragged=True),
    Case("large_ties", batch=2, kv_heads=8, slots=40001, number=0.3, like="ties", ragged=True),
    Case("large_zeros", batch=1, kv_heads=4, slots=20000, number=0.1, like="zeros"),
    Case("large_all", batch=1, kv_heads=3, slots=9000, number=1.0, ragged=True),
    # samples see zeros alone, half of the slots
    Case("large_striped", batch=4, kv_heads=8, slots=65536, number=0.04, like="striped"),
    Case("large_striped_ragged", batch=1, kv_heads=3, slots=65536, like="striped", ragged=True),
    # samples see the largest alone: too few are gathered
    Case("large_inverted", batch=4, kv_heads=8, slots=65536, number=0.7, like="inverted"),
    Case("large_few", batch=1, kv_heads=8, slots=65536, number=1.6e-4),  # 6 are ranked
    Case("large_number", batch=2, kv_heads=8, slots=65536, number=0.5, ragged=True),
    Case("large_constant", batch=8, kv_heads=8, slots=32768, number=0.04, like="constant"),
    Case("large_flat", batch=1, kv_heads=8, slots=131072, number=0.04, like="flat"),
    Case("large_flat_ragged", batch=8, kv_heads=8, slots=32768, like="flat", ragged=True),
    Case("large_gap", batch=1, kv_heads=8, slots=131072, number=0.04, like="gap"),
    Case("large_gap_ragged", batch=8, kv_heads=8, slots=32768, like="gap", ragged=True),
    # a program for every head
    Case("large_batch", batch=32, kv_heads=8, slots=9001, number=0.04, ragged=True),
    Case("large_one", batch=1, kv_heads=1, slots=131072, number=1e-5),
)
BEST = [case for case in (*CASES, *LARGE) if case.a is None]


@partial(jax.jit, static_argnames=("capacity", "sink", "implementation"))
def listed(vertical, distance, lengths, rule, **options):
    return table_candidates(vertical, distance, lengths, rule, **options)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", BEST, ids=str)
def test_lists_what_the_reference_lists(case, seed):
    inputs = case.build(seed)
    got, want = (
        listed(*inputs[:4], **inputs.kwargs, implementation=name)
        for name in ("triton", "reference")
    )
    np.testing.assert_array_equal(got.count, want.count)
    np.testing.assert_array_equal(got.ids, want.ids)


@pytest.mark.parametrize("name", ["large_past", "large_striped"])
def test_the_same_call_lists_the_same(name):
    """Programs of a head that did not wait for each other would show sooner or later."""
    inputs = next(case for case in LARGE if case.name == name).build()
    first = listed(*inputs[:4], **inputs.kwargs, implementation="triton")
    for _ in range(50):
        again = listed(*inputs[:4], **inputs.kwargs, implementation="triton")
        np.testing.assert_array_equal(again.count, first.count)
        np.testing.assert_array_equal(again.ids, first.ids)
