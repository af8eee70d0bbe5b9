"""Tests how bench.sanitize tells a clean line from others."""

import pytest

from bench.sanitize import is_clean

MEMORY, RACES = (
    "ERROR SUMMARY: 0 errors",
    "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
)


@pytest.mark.parametrize("summary", [MEMORY, RACES, f"{MEMORY}; {MEMORY}"])
def test_all_cases_and_no_complaint_are_clean(summary):
    assert is_clean(f"threshold_select, memcheck: 8 of 8 cases in 29 s; {summary}")


@pytest.mark.parametrize(
    "line",
    [
        f"threshold_select, memcheck: 7 of 8 cases in 29 s; {MEMORY}",
        "threshold_select, memcheck: 8 of 8 cases in 29 s",
        f"threshold_select, memcheck: 8 of 8 cases in 29 s; {MEMORY}; ERROR SUMMARY: 3 errors",
        f"threshold_select, memcheck: 8 of 18 cases in 29 s; {MEMORY}",
    ],
)
def test_anything_else_is_not(line):
    assert not is_clean(line)
