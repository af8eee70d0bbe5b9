"""Tests bench.kernels on a CPU: its cases, the summary of a profile, the table; no times."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from bench.kernels import measure
from bench.lib.kernel_cases import CASES, hybrid, shrunk
from bench.lib.kernel_programs import inputs
from bench.lib.kernel_table import lines
from bench.lib.kernel_timing import (
    Event,
    segments,
    step_kernels,
    summary,
)
from jsparse.selection.attended import read_tokens
from tests.support.marks import slow_except

on_a_cpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="would time the GPU")


@pytest.mark.slow
@on_a_cpu
def test_a_tiny_run_gives_a_row_a_contender_and_a_table():
    report = measure(
        ["4096 of 128K b1", "2% rows", "page_bounds"],
        ["torch"],
        grids=["grid", "hybrid"],
        tiny=True,
    )
    assert [row["case"] for row in report["results"]] == [
        "4096 of 128K b1",
        "2% rows of 30K b64",
        "page_bounds 128K b1",
    ]
    assert all(
        row["contender"] == "reference" and row["us"]["median"] > 0 for row in report["results"]
    )
    assert report["left_out"] == {"torch": "needs a GPU"}
    assert (len(report["grid"]), len(report["hybrid"])) == (6, 10)
    assert not any("refused" in row or "error" in row for row in report["grid"] + report["hybrid"])
    assert json.loads(json.dumps(report)) == report
    table = list(lines(report))
    assert all(len(line) <= 150 for line in table)
    assert sum(line.startswith("4096 of 128K b1") for line in table) == 1
    assert [row["sparse_heads"] for row in report["hybrid"]] == 2 * [0, 4, 6, 7, 8]
    listed = [line for line in table if line.startswith("256, 4096 listed, batch 1")]
    assert len(listed) == 1 and listed[0].count("/") == 5


HYBRIDS = [replace(case, name=f"{case.name} {case.dense}") for case in hybrid(10**9)[:10]]


@pytest.mark.parametrize(
    "case", slow_except([*CASES, *HYBRIDS], *CASES[:6:2], HYBRIDS[2]), ids=lambda case: case.name
)
def test_bytes_are_those_that_the_selection_reads(case):
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
    assert case.bytes == 2 * 2 * 128 * tokens + 4 * words * int(np.asarray(selection.count).sum())


def run_of(start: float, *durations: float) -> list[Event]:
    """Returns kernels one after the other, a microsecond apart, named by their place."""
    events = []
    for nth, duration in enumerate(durations):
        events.append(Event(f"k{nth % 2}", start, duration))
        start += duration + 1
    return events


def test_a_profile_is_summed_up_by_call():
    events = [
        *run_of(0, 500, 3, 4, 3, 4),
        *run_of(1000, 500, 3, 6, 3, 4),
    ]  # the lead's, then two calls of two kernels
    found = summary(events, repeats=2, calls=2, skip=1)
    assert found["launches"] == 2
    assert (found["device"]["min"], found["device"]["max"]) == (9, 11)
    assert (found["kernels"]["min"], found["kernels"]["max"]) == (7, 9)
    assert {name: kernel["launches"] for name, kernel in found["by_kernel"].items()} == {
        "k0": 1,
        "k1": 1,
    }
    alone = summary(run_of(0, 500, 3, 4), repeats=1, calls=1, skip=1)
    assert alone["device"]["median"] == 8  # no next call: to the end of its own
    # three kernels of two calls, 13 and 15 microseconds from the first to the end of the last
    uneven = [*run_of(0, 500, 3, 4, 4), *run_of(1000, 500, 3, 6, 4)]
    found = summary(uneven, repeats=2, calls=2, skip=1)
    assert (found["device"]["min"], found["device"]["max"]) == (6.5, 7.5)
    assert found["kernels"]["median"] == 6 and found["launches"] == 1.5 and "order" not in found
    assert "profile_error" in summary(events[:-1], repeats=2, calls=2, skip=1)
    assert [len(part) for part in segments([*events, *run_of(1e6, 1, 1)], pause=1e4)] == [10, 2]


def test_a_step_is_told_by_its_kernels():
    """Numbers that XLA gives to names are left out, and time in which two run counts once."""
    events = [
        Event("fusion_1", 0.0, 4.0),
        Event("select", 3.0, 3.0),
        Event("fusion.23", 10.0, 2.0),
        Event("fusion", 20.0, 2.0),
    ]
    found = step_kernels(events, 2)
    assert (found["span"], found["busy"], found["launches"]) == (11.0, 5.0, 2.0)
    assert list(found["kernels"]) == ["fusion", "select"]
    assert found["kernels"]["fusion"] == {"launches": 1.5, "us": 4.0, "each": 2.0}
    assert step_kernels([], 2) == {}
