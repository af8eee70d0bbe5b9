"""Tests table_update against a loop over each head's list, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.pallas_kernels.table_update import table_update
from tests.kernels.cases.table_update import CASES, Case
from tests.support.marks import slow_except_named

cases = st.builds(
    Case,
    name=st.just(""),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    slots=st.integers(1, 50),
    entries=st.integers(1, 40),
    listed=st.sampled_from(["any", "none", "sinks", "all"]),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    scale=st.floats(1.0, 4096.0),
    penalty=st.floats(0.0, 0.99),
    sink=st.integers(0, 5),
)


def expected(inputs):
    """Both tables in float64, and what was added to them."""
    inputs = jax.device_get(inputs)
    listed, sink = inputs.listed, inputs.kwargs["sink"]
    tables = [np.asarray(x, np.float64) for x in inputs[:2]]
    added = [np.zeros_like(table) for table in tables]
    for head in np.ndindex(*inputs.lengths.shape):
        count, newest = int(listed.count[head]), int(inputs.lengths[head]) - 1
        ids = listed.ids[head][:count]
        inside = ids >= sink
        if not inside.any():
            continue
        logits = np.asarray(listed.logits[head], np.float64)[:, :count]
        shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
        best = shares.max(0)[inside]
        less = inputs.kwargs["penalty"] / inside.sum()
        new = float(inputs.scale[head[0]]) * (best / best.sum() - less)
        added[0][head][ids[inside]] = new
        added[1][head][newest - ids[inside]] = new
    return [table + more for table, more in zip(tables, added, strict=True)], added


update = jax.jit(table_update, static_argnames=("sink", "penalty"))


def check(case, seed=0):
    inputs = case.build(seed)
    got = update(*inputs[:5], **inputs.kwargs)
    for table, old, wanted, added in zip(got, inputs[:2], *expected(inputs), strict=True):
        assert table.dtype == jnp.bfloat16
        found = np.asarray(table, np.float32)
        changed = added != 0
        np.testing.assert_array_equal(found[~changed], np.asarray(old, np.float32)[~changed])
        # one rounding of the sum, and float32's of what is added
        error = 2.0**-8 * np.abs(wanted) + 1e-5 * np.abs(added)
        assert (np.abs(found - wanted) <= error).all()


# a size of its own is a program of its own
SLOW = {"one_head", "group_of_7", "one_entry", "one_slot", "long", "all"}
SOME = tuple(case.name for case in CASES if case.name not in SLOW)


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
def test_weights_are_added_to_both_tables(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases, st.integers(0, 2**32 - 1))
def test_any_shape(case, seed):
    check(case, seed)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    empty = [bool((np.asarray(case.build().listed.count) == 0).any()) for case in CASES]
    assert any(empty) and not all(empty)


INPUTS = Case("").build()
LISTED = INPUTS.listed


def part(x, *of):
    return jax.device_put(np.asarray(x)[of])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"vertical": part(INPUTS.vertical, slice(1))},
            {},
            r"distance=bfloat16\[2, 4, 200\]: must be bfloat16\[",
        ),
        (
            {"distance": part(INPUTS.distance, ..., slice(1, None))},
            {},
            r"distance=bfloat16\[2, 4, 199\]: must be bfloat16\[",
        ),
        (
            {"vertical": jax.device_put(np.asarray(INPUTS.vertical, np.float16))},
            {},
            r"vertical=float16\[2, 4, 200\]: must be bfloat16\[",
        ),
        (
            {"listed": LISTED._replace(ids=part(LISTED.ids, slice(1)))},
            {},
            r"listed.ids=int32\[1, 4, 41\]: must be int32\[",
        ),
        (
            {"listed": LISTED._replace(count=part(LISTED.count, 0))},
            {},
            r"listed.count=int32\[4\]: must be int32\[",
        ),
        (
            {"listed": LISTED._replace(logits=part(LISTED.logits, ..., slice(1, None)))},
            {},
            r"listed.logits=float32\[2, 4, 4, 40\]: must be float32\[",
        ),
        (
            {"scale": part(INPUTS.scale, slice(1))},
            {},
            r"scale=float32\[1\]: must be float32\[",
        ),
        (
            {"listed": LISTED._replace(lse=part(LISTED.lse, ..., slice(1)))},
            {},
            r"listed.lse=float32\[2, 4, 1\]: must be float32\[",
        ),
        ({}, {"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({}, {"penalty": 1.0}, "penalty=1.0: must be a number from 0 to below 1"),
        ({}, {"implementation": "abacus"}, "implementation='abacus': table_update has"),
    ],
)
def test_wrong_calls_are_refused(change, options, message):
    inputs = INPUTS._replace(**change)
    with pytest.raises(ValueError, match=message):
        table_update(*inputs[:5], **{**inputs.kwargs, **options})
