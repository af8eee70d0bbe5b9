"""Tests the scheduler with a hundred thousand random events, too many for the pure tests."""

import pytest

from tests.support.random_events import MACHINES, run_events


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_hundred_thousand_random_events(machine):
    run_events(machine, 100, 500)
