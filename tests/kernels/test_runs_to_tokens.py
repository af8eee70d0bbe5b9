"""Tests runs_to_tokens against a loop over each head's runs."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from tests.kernels.cases.runs_to_tokens import CASES, JUNK, Case
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}
cases = st.builds(
    Case,
    name=st.just(""),
    runs=st.just(40),
    listed=st.sampled_from([1, 12]),
    count=st.sampled_from(["any", "all"]),
    like=st.sampled_from(["short", "one_long", "mixed"]),
    long=st.sampled_from([0, 3, 700]),
    shared=st.booleans(),
    outside=st.booleans(),
    capacity=st.sampled_from([1, 100]),
)
compiled = jax.jit(runs_to_tokens, static_argnames=("capacity", "implementation"))


def expected(inputs, head) -> list[int]:
    """Lists all slots of one head's runs, and those outside all runs if it has a length."""
    ids, number, edges = (np.asarray(x) for x in inputs[:3])
    edges = np.broadcast_to(edges, (*number.shape, edges.shape[-1]))[head]
    slots: list[int] = []
    for i in ids[head][: number[head]]:
        slots += range(edges[i], edges[i + 1])
    if inputs.lengths is None:
        return slots
    length = int(np.asarray(inputs.lengths)[head])
    slots = [*range(edges[0]), *slots, *range(edges[-1], length)]
    return [slot for slot in slots if slot < length]


def check(case: Case, seed: int = 0) -> None:
    inputs, capacity = case.build(seed)
    got = compiled(*inputs, capacity=capacity)
    assert (got.granularity, got.bits, got.dense) == ("token", None, None)
    assert (got.ids.dtype, got.count.dtype) == (np.int32, np.int32)
    ids, count = np.asarray(got.ids), np.asarray(got.count)
    for head in np.ndindex(*inputs.number.shape):
        want = expected(inputs, head)[:capacity]
        assert count[head] == len(want)
        assert ids[head].tolist() == want + [0] * (capacity - len(want))


@pytest.mark.parametrize(
    "case",
    slow_except_named(CASES, "all", "cut_in_a_long_run", "outside", "outside_cut", "odd"),
    ids=str,
)
def test_lists_what_a_loop_lists(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=40)
@given(cases, st.integers(0, 2**32 - 1))
def test_any_runs(case, seed):
    check(case, seed)


def test_cases_are_what_they_say():
    assert len(by_name) == len(CASES)
    for case in CASES:
        inputs, capacity = case.build(3)
        number, edges = map(np.asarray, inputs[1:3])
        assert (edges[..., 1:] >= edges[..., :-1]).all()
        past = np.arange(case.listed) >= number[..., None]
        assert (np.asarray(inputs.ids)[past] == JUNK).all()
        needed = [len(expected(inputs, head)) for head in np.ndindex(*number.shape)]
        cut = "cut" in case.name or case.name in ("one_slot", "odd")
        assert (max(needed) > capacity) == cut, case.name
    assert np.diff(np.asarray(by_name["cut_in_a_long_run"].build()[0].edges)).max() == 5000
    assert (np.asarray(by_name["any"].build()[0].number) == 0).any()


INPUTS = by_name["any"].build()[0]
IDS, NUMBER, EDGES = (np.asarray(x) for x in INPUTS[:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ids": jax.device_put(IDS[0])},
            r"ids=int32\[3, 12\]: must be int32\[.*>0",
        ),
        (
            {"ids": jax.device_put(IDS[..., :0])},
            r"ids=int32\[2, 3, 0\]: must be int32\[.*>0",
        ),
        (
            {"number": jax.device_put(NUMBER[:1])},
            r"count=int32\[1, 3\]: must be int32\[",
        ),
        (
            {"edges": jax.device_put(EDGES[:, :2])},
            r"edges=int32\[2, 2, 41\]: must be int32\[",
        ),
        (
            {"edges": jax.device_put(EDGES[..., :1])},
            r"edges.shape=\(2, 3, 1\): must have at least two edges per head",
        ),
        (
            {"lengths": jax.device_put(NUMBER[:, :1])},
            r"lengths=int32\[2, 1\]: must be int32\[",
        ),
        (
            {"ids": jax.device_put(IDS.astype(np.uint32))},
            r"ids=uint32\[2, 3, 12\]: must be int32\[",
        ),
        (
            {"lengths": jax.device_put(NUMBER.astype(np.float32))},
            r"lengths=float32\[2, 3\]: must be int32\[",
        ),
        ({"capacity": 0}, "capacity=0: must be an integer of at least 1"),
        ({"capacity": True}, "capacity=True: must be an integer of at least 1"),
        ({"implementation": "abacus"}, "implementation='abacus': runs_to_tokens has"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    arrays = {name: change.get(name, value) for name, value in INPUTS._asdict().items()}
    options = {name: value for name, value in change.items() if name not in arrays}
    with pytest.raises(ValueError, match=message):
        runs_to_tokens(*arrays.values(), **{"capacity": 64, **options})
