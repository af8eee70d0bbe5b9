"""Tests how the engine estimates the times of programs."""

from dataclasses import replace

import pytest

from bench.lib.smollm2 import SMOLLM2
from jsparse.engine.pace import NEWEST, Pace

pytestmark = pytest.mark.pure


def test_nothing_is_known_at_first():
    pace = Pace(SMOLLM2)
    assert pace.reading(1, 512, 0) is None
    assert pace.step(8) is None


def test_estimates_are_medians_so_that_one_slow_program_does_not_count():
    pace = Pace(SMOLLM2)
    for milliseconds in (300, 16, 24, 16):
        pace.observe_steps(8, 8, milliseconds)
        pace.observe_reading(1, 512, 0, milliseconds)
    assert pace.step(8) == 2.5
    assert pace.reading(1, 512, 0) == pytest.approx(20)
    for _ in range(NEWEST):
        pace.observe_steps(8, 2, 14)
    assert pace.step(8) == 7


def test_programs_of_other_sizes_are_as_slow_as_the_slowest_known():
    pace = Pace(SMOLLM2)
    pace.observe_steps(8, 1, 2)
    pace.observe_steps(64, 1, 5)
    assert (pace.step(8), pace.step(16), pace.step(64)) == (2, 5, 5)
    pace.observe_reading(1, 512, 0, 10)
    assert pace.reading(8, 512, 0) == pytest.approx(80)


def test_tokens_take_longer_the_further_they_are_from_the_beginning():
    """By attention's arithmetic beside that of the matrices, here alike at position 96."""
    config = replace(SMOLLM2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
    # 16·8·2·(2 + 1) + 3·16·n = 2·2·8·96 for n = 48
    pace = Pace(replace(config, intermediate_size=48))
    pace.observe_reading(1, 64, 0, 1 + 32 / 96)
    assert pace.reading(1, 64, 96) == pytest.approx(2 + 32 / 96)
