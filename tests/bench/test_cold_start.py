"""Tests bench.cold_start: medians of the runs of a checkout, and the CPU seconds of a process."""

import subprocess
import sys

import pytest

from bench.cold_start import CALLS, cpu_seconds, summary

pytestmark = pytest.mark.pure


def run(seconds):
    """Results of one run, all of whose times are the same."""
    calls = [
        {"prompt": prompt, "new": new, "cpu_seconds": seconds, "programs": nth}
        for nth, (prompt, new) in enumerate(CALLS)
    ]
    served = {"dense": {"ready_cpu": seconds, "at_rest_cpu": 2 * seconds}}
    return {"serve": served, "prompts": {"calls": calls, "first_token": [seconds] * 5}}


def test_medians_are_those_of_the_runs():
    row = summary([run(3.0), run(1.0), run(2.0)])
    assert row["serve"]["dense"]["at_rest_cpu"] == {"median": 4.0, "min": 2.0, "max": 6.0}
    assert [call["programs"] for call in row["calls"]] == [*range(len(CALLS))]
    assert {call["cpu_seconds"]["median"] for call in row["calls"]} == {2.0}
    assert row["first_token_seconds"]["max"] == 3.0


def test_cpu_seconds_of_a_process_are_read_while_it_runs():
    busy = "while True: pass"
    process = subprocess.Popen([sys.executable, "-c", busy], text=True)
    try:
        while cpu_seconds(process) < 0.05:
            pass
    finally:
        process.kill()
        process.wait()
