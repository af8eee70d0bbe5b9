"""Tests table_candidates against a loop over each head's slots, in the order of their rank."""

from functools import partial

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.table_candidates import Best, Kurtosis, table_candidates
from tests.kernels.cases.table_candidates import CASES
from tests.support.marks import slow_except_named


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
    """Lists the candidates in one program for all inputs of these shapes."""
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


# cases that share a program, and an odd size
SOME = (
    "best_ties",
    "best_one",
    "best_below_sinks",
    "best_capped",
    "best_odd",
    "paper",
    "paper_ties",
    "paper_constant",
    "paper_floor",
    "paper_capped",
)


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
def test_best_slots_are_listed(case):
    check(case)


@pytest.mark.parametrize("case", ["best_ragged", "paper_ragged"])
def test_common_factor_of_all_entries_changes_nothing(case):
    inputs = next(c for c in CASES if c.name == case).build()
    # entries so small that the factor would make them 0 are set to 0 beforehand
    vertical, distance = (
        np.where(np.abs(x) < 2.0**-30, np.zeros_like(x), x)
        for x in (np.asarray(inputs.vertical), np.asarray(inputs.distance))
    )
    inputs = inputs._replace(vertical=vertical, distance=distance)
    for factor in np.asarray([2.0**-60, 2.0**60], vertical.dtype):
        scaled = inputs._replace(vertical=vertical * factor, distance=distance * factor)
        np.testing.assert_array_equal(listed(scaled).ids, listed(inputs).ids)


def test_wrong_calls_are_refused():
    inputs = CASES[0].build()
    kurtosis = Kurtosis(0.2, inputs.lengths, inputs.lengths)
    for rule, options, message in (
        (7, {}, "rule=7: must be Best or Kurtosis"),
        (kurtosis, {"implementation": "triton"}, "takes the rule Best alone"),
        (inputs.rule, {"capacity": 0}, "capacity=0: must be an integer from 1 to S = 200"),
        (inputs.rule, {"capacity": 201}, "capacity=201: must be an integer from 1 to S = 200"),
        (inputs.rule, {"sink": -1}, "sink=-1: must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            table_candidates(*inputs[:3], rule, **{**inputs.kwargs, **options})
