"""Tests what bench.decode_step divides its times by."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.decode_step import dispatched


@pytest.mark.parametrize(("rounds", "number"), [(False, 10), (True, 3)])
def test_steps_are_counted_not_programs(rounds, number):
    """Before maintenance a program has one step; a round counts as one."""
    results = [SimpleNamespace(tokens=np.zeros((steps, 4))) for steps in (8, 1, 1, 8)]
    assert dispatched(iter(results), 3, rounds=rounds) == (results[2], number)
