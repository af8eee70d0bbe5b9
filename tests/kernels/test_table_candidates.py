"""Tests table_candidates against a loop over each head's slots, in the order of their rank."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.pallas_kernels.table_candidates import Best, Kurtosis, table_candidates
from jsparse.pallas_kernels.table_candidates.cases import CASES, Case

cases = st.builds(
    Case,
    name=st.just(""),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    slots=st.integers(1, 60),
    number=st.floats(0.01, 1.0),
    a=st.none() | st.floats(1e-3, 2.0),
    floor=st.booleans(),
    sink=st.integers(0, 6),
    like=st.sampled_from(
        ["past", "signed", "ties", "constant", "zeros", "large", "striped", "flat", "gap"]
    ),
    ragged=st.booleans(),
)


def expected(inputs):
    """The ids of every head, as lists."""
    vertical, distance, lengths, rule, kwargs = inputs
    vertical, distance = (np.asarray(x.astype(jnp.float32)) for x in (vertical, distance))
    listed = np.empty(lengths.shape, object)
    for head in np.ndindex(*lengths.shape):
        listed[head] = of_head(
            vertical[head], distance[head], int(lengths[head]), head, rule, **kwargs
        )
    return listed


def of_head(vertical, distance, length, head, rule, capacity, sink):
    newest = length - 1
    slots = [i for i in range(length) if sink <= i < newest]
    tables = [{i: vertical[i] for i in slots}, {i: distance[newest - i] for i in slots}]
    score = {i: max(0.0, *(table[i] for table in tables)) for i in slots}
    always = [i for i in range(length) if i < sink]
    always += [newest] if newest >= sink else []
    best = sorted(slots, key=lambda i: (-score[i], i))
    if isinstance(rule, Best):
        number = int(rule.number[head])
    else:
        marked = standing_out(tables, slots, rule.a)
        best = [i for i in best if i in marked] + [i for i in best if i not in marked]
        number = max(len(marked) + len(always), int(rule.least[head]))
        number = min(number, int(rule.most[head]))
    return sorted([*always, *best][: min(max(number, 1), capacity)])


def standing_out(tables, slots, a):
    out, means = set(), []
    for table in tables:
        x = np.array([table[i] for i in slots], np.float64)
        means.append(x.mean() if slots else 0.0)
        around = x - means[-1]
        if np.any(x != x[:1]):
            kurtosis = (around**4).sum() / (around**2).sum() ** 2
            out |= {i for i in slots if table[i] > a * means[-1] / kurtosis}
    near = {i + offset for i in out for offset in (-1, 0, 1, 2)}
    above = {i for i in slots if any(t[i] > mean for t, mean in zip(tables, means, strict=True))}
    return near & above


def check(case, seed=0):
    inputs = case.build(seed)
    chosen = table_candidates(*inputs[:4], **inputs.kwargs)
    assert chosen.granularity == "token" and chosen.bits is None and chosen.dense is None
    assert chosen.ids.shape == (*inputs.lengths.shape, inputs.kwargs["capacity"])
    ids, count, wanted = np.asarray(chosen.ids), np.asarray(chosen.count), expected(inputs)
    for head in np.ndindex(*count.shape):
        assert ids[head][: count[head]].tolist() == wanted[head], head
        assert not ids[head][count[head] :].any()


# a size of its own compiles everything anew
SLOW = {
    "best_one_slot",
    "best_odd",
    "best_long",
    "best_striped",
    "best_all",
    "best_one",
    "paper_long",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in SLOW))
        for case in CASES
    ],
)
def test_the_best_slots_are_listed(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases, st.integers(0, 2**32 - 1))
def test_any_shape(case, seed):
    check(case, seed)


@pytest.mark.parametrize("factor", [2.0**-60, 64, 2.0**60])
@pytest.mark.parametrize("case", ["best_ragged", "paper_ragged"])
def test_a_factor_on_all_entries_changes_nothing(case, factor):
    inputs = next(c for c in CASES if c.name == case).build()
    # entries so small that the factor would make them 0 have been 0 before
    vertical, distance = (
        jnp.where(jnp.abs(x) < 2.0**-30, 0, x) for x in (inputs.vertical, inputs.distance)
    )
    inputs = inputs._replace(vertical=vertical, distance=distance)
    scaled = inputs._replace(vertical=vertical * factor, distance=distance * factor)
    got, same = (table_candidates(*x[:4], **x.kwargs) for x in (inputs, scaled))
    np.testing.assert_array_equal(got.ids, same.ids)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    bounds = set()
    for case in (case for case in CASES if case.name not in SLOW):
        rule = case.build().rule
        if isinstance(rule, Kurtosis):
            inputs = case.build()
            count = np.asarray(table_candidates(*inputs[:4], **inputs.kwargs).count)
            low, high = (np.asarray(x) for x in (rule.least, rule.most))
            bounds |= set(np.where(count == high, "most", np.where(count == low, "least", "")).flat)
    assert bounds == {"most", "least", ""}


INPUTS = Case("").build()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"vertical": INPUTS.vertical[:1]}, {}, r"vertical.shape=.*must be \[B, K, S\]"),
        ({"distance": INPUTS.distance[..., 1:]}, {}, r"distance.shape=.*like the other table's"),
        (
            {"distance": INPUTS.distance.astype(jnp.float32)},
            {},
            "distance.dtype=float32: must be bfloat16",
        ),
        ({"rule": Best(INPUTS.lengths[:1])}, {}, r"rule.number.shape=\(1, 4\): must be \[B, K\]"),
        (
            {"rule": Kurtosis(0.2, INPUTS.lengths, INPUTS.lengths[0])},
            {},
            r"rule.most.shape=\(4,\): must be \[B, K\]",
        ),
        ({"rule": 7}, {}, "rule=7: must be Best or Kurtosis"),
        ({}, {"capacity": 0}, "capacity=0: must be an integer from 1 to S = 200"),
        ({}, {"capacity": 201}, "capacity=201: must be an integer from 1 to S = 200"),
        ({}, {"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({}, {"implementation": "abacus"}, "implementation='abacus': table_candidates has"),
    ],
)
def test_wrong_calls_are_refused(change, options, message):
    inputs = INPUTS._replace(**change)
    with pytest.raises(ValueError, match=message):
        table_candidates(*inputs[:4], **{**inputs.kwargs, **options})


@pytest.mark.slow
def test_a_head_alone_lists_what_it_lists_in_a_batch():
    inputs = replace(Case(""), ragged=True, a=0.05).build()
    whole = table_candidates(*inputs[:4], **inputs.kwargs)
    one = jax.tree.map(lambda x: x[1:, :1] if hasattr(x, "ndim") else x, inputs[:4])
    alone = table_candidates(*one, **inputs.kwargs)
    np.testing.assert_array_equal(alone.ids, whole.ids[1:, :1])
