"""Tests runs_to_tokens against a loop over each head's runs."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from tests.kernels.cases.runs_to_tokens import CASES, Case
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}
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
def test_lists_match_a_loop(case):
    check(case)


def test_wrong_calls_are_refused():
    ids, number, edges, _ = by_name["any"].build()[0]
    with pytest.raises(ValueError, match=r"edges.shape=\(2, 3, 1\): must have at least two edges"):
        runs_to_tokens(ids, number, edges[..., :1], capacity=64)
    for capacity in (0, True):
        with pytest.raises(ValueError, match=f"capacity={capacity}: must be an integer of at le"):
            runs_to_tokens(ids, number, edges, capacity=capacity)
