"""Tests table_candidates against a loop over each head's slots, in the order of their rank."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.pallas_kernels.table_candidates import Best, Kurtosis, table_candidates
from tests.kernels.cases.table_candidates import CASES, Case
from tests.support.marks import slow_except_named

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
    vertical, distance = (np.asarray(x, np.float32) for x in (vertical, distance))
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
        number = max(len(marked) + len(always), int(rule.min_count[head]))
        number = min(number, int(rule.max_count[head]))
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


@partial(jax.jit, static_argnames=("form", "a", "capacity", "sink"))
def run(tables, lengths, numbers, form, a, capacity, sink):
    rule = form(*a, *numbers)
    return table_candidates(*tables, lengths, rule, capacity=capacity, sink=sink)


def listed(inputs):
    """Lists the candidates in a program that all inputs of these shapes share."""
    vertical, distance, lengths, rule, kwargs = inputs
    a, numbers = ((rule.a,), rule[1:]) if isinstance(rule, Kurtosis) else ((), tuple(rule))
    return run((vertical, distance), lengths, numbers, type(rule), a, **kwargs)


def check(case, seed=0):
    inputs = case.build(seed)
    chosen = listed(inputs)
    assert chosen.granularity == "token" and chosen.bits is None and chosen.dense is None
    assert chosen.ids.shape == (*inputs.lengths.shape, inputs.kwargs["capacity"])
    ids, count, wanted = np.asarray(chosen.ids), np.asarray(chosen.count), expected(inputs)
    for head in np.ndindex(*count.shape):
        assert ids[head][: count[head]].tolist() == wanted[head], head
        assert not ids[head][count[head] :].any()


# those that share a program, and an odd size
SOME = (
    "best",
    "best_signed",
    "best_ties",
    "best_zeros",
    "best_large",
    "best_one",
    "best_below_sinks",
    "best_capped",
    "best_odd",
    "paper",
    "paper_signed",
    "paper_ties",
    "paper_constant",
    "paper_zeros",
    "paper_large",
    "paper_floor",
    "paper_capped",
)


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
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
        np.where(np.abs(x) < 2.0**-30, np.zeros_like(x), x)
        for x in (np.asarray(inputs.vertical), np.asarray(inputs.distance))
    )
    factor = np.asarray(factor, vertical.dtype)
    inputs = inputs._replace(vertical=vertical, distance=distance)
    scaled = inputs._replace(vertical=vertical * factor, distance=distance * factor)
    got, same = listed(inputs), listed(scaled)
    np.testing.assert_array_equal(got.ids, same.ids)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    bounds = set()
    for name in ("paper", "paper_floor", "paper_most"):
        inputs = next(c for c in CASES if c.name == name).build()
        rule = inputs.rule
        if isinstance(rule, Kurtosis):
            count = np.asarray(listed(inputs).count)
            low, high = (np.asarray(x) for x in (rule.min_count, rule.max_count))
            bounds |= set(np.where(count == high, "max", np.where(count == low, "min", "")).flat)
    assert bounds == {"max", "min", ""}


INPUTS = Case("").build()


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
            {"distance": jax.device_put(np.asarray(INPUTS.distance, np.float32))},
            {},
            r"distance=float32\[2, 4, 200\]: must be bfloat16\[",
        ),
        (
            {"rule": Best(part(INPUTS.lengths, slice(1)))},
            {},
            r"rule.number=int32\[1, 4\]: must be int32\[",
        ),
        (
            {"rule": Kurtosis(0.2, INPUTS.lengths, part(INPUTS.lengths, 0))},
            {},
            r"rule.max_count=int32\[4\]: must be int32\[",
        ),
        ({"rule": 7}, {}, "rule=7: must be Best or Kurtosis"),
        (
            {"rule": Kurtosis(0.2, INPUTS.lengths, INPUTS.lengths)},
            {"implementation": "triton"},
            "implementation='triton': .*takes the rule Best alone",
        ),
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
    whole = listed(inputs)
    one = jax.tree.map(lambda x: x[1:, :1] if hasattr(x, "ndim") else x, inputs[:4])
    alone = table_candidates(*one, **inputs.kwargs)
    np.testing.assert_array_equal(alone.ids, whole.ids[1:, :1])
