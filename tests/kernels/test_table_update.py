"""Tests table_update against a loop over each head's list, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.table_update import table_update
from tests.kernels.cases.table_update import CASES
from tests.support.marks import slow_except_named


def expected(inputs):
    """Both tables in float64, and the added weights."""
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
        # one rounding of the sum, and the float32 rounding of the added weight
        error = 2.0**-8 * np.abs(wanted) + 1e-5 * np.abs(added)
        assert (np.abs(found - wanted) <= error).all()


@pytest.mark.parametrize(
    "case", slow_except_named(CASES, "penalty", "large_scale", "none", "sinks", "no_sink"), ids=str
)
def test_weights_are_added_to_both_tables(case):
    check(case)


def test_wrong_calls_are_refused():
    inputs = CASES[0].build()
    for option, message in (
        ({"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({"penalty": 1.0}, "penalty=1.0: must be a number from 0 to below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            table_update(*inputs[:5], **{**inputs.kwargs, **option})
