"""Tests the cases of bench.kernels and its summary of a profile."""

import jax
import numpy as np
import pytest

from bench.lib.kernel_cases import CASES, INT8_CASES, shrunk
from bench.lib.kernel_programs import inputs
from bench.lib.kernel_timing import (
    Event,
    segments,
    summary,
)
from jsparse.selection.attended import read_tokens


@pytest.mark.parametrize("case", [*CASES[:6:2], INT8_CASES[2]], ids=lambda case: case.name)
def test_bytes_are_those_of_the_selected_tokens(case):
    case = shrunk(case)
    _, lengths, selection = jax.jit(lambda: inputs(case, seed=3))()
    ids = np.asarray(selection.ids).reshape(case.pairs, selection.ids.shape[-1])
    listed = [
        row[:count] for row, count in zip(ids, np.asarray(selection.count).reshape(-1), strict=True)
    ]
    assert all((np.diff(row) > 0).all() for row in listed)
    words = 2 if case.bits else 1
    tokens = int(
        np.asarray(jax.jit(read_tokens, static_argnums=2)(selection, lengths, case.page)).sum()
    )
    of_token = 2 * (128 + 2) if case.int8 else 2 * 2 * 128
    assert case.bytes == of_token * tokens + 4 * words * int(np.asarray(selection.count).sum())


def run_of(start: float, *durations: float) -> list[Event]:
    """Returns n kernels in sequence, one microsecond apart, named by their index."""
    events = []
    for nth, duration in enumerate(durations):
        events.append(Event(f"k{nth % 2}", start, duration))
        start += duration + 1
    return events


def test_profile_is_summed_by_call():
    events = [
        *run_of(0, 500, 3, 4, 3, 4),
        *run_of(1000, 500, 3, 6, 3, 4),
    ]  # a preamble, then two calls of two kernels each
    found = summary(events, repeats=2, calls=2, skip=1)
    assert found["launches"] == 2
    assert (found["device"]["min"], found["device"]["max"]) == (9, 11)
    assert (found["kernels"]["min"], found["kernels"]["max"]) == (7, 9)
    assert {name: kernel["launches"] for name, kernel in found["by_kernel"].items()} == {
        "k0": 1,
        "k1": 1,
    }
    alone = summary(run_of(0, 500, 3, 4), repeats=1, calls=1, skip=1)
    assert alone["device"]["median"] == 8  # no next call: up to its own end
    assert "profile_error" in summary(events[:-1], repeats=2, calls=2, skip=1)
    assert [len(part) for part in segments([*events, *run_of(1e6, 1, 1)], pause=1e4)] == [10, 2]
