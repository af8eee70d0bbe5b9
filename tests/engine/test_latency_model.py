"""Tests the engine's estimates of program times."""

from dataclasses import replace

import pytest

from bench.lib.shapes import SMOLLM2
from jsparse.engine.latency_model import NEWEST, LatencyModel
from jsparse.engine.step_plan import Chunk, DecodePlan, PrefillPlan
from tests.support.planning import SIZES

pytestmark = pytest.mark.pure


def prefill_plan(rows, size, start=0, *, replay=False):
    chunk = Chunk(0, 0, 0, fresh=True, start=start, valid=size, groups=[])
    return PrefillPlan(rows, size, last=False, replay=replay, chunks=[chunk])


def decoding(rows, steps):
    return DecodePlan(rows, steps, [])


def test_rounds_determine_the_draft_length():
    """Per number of rows: drafting is slow for eight rows and fast for one; all drafts agree."""
    sizes = SIZES._replace(rows=(1, 8), drafts=(4, 2), adapts=True)
    latency = LatencyModel(SMOLLM2, sizes)
    for _ in range(40):
        for rows, each in ((1, 1), (8, 200)):
            number = latency.drafts(rows)
            of_all = [number] * rows
            latency.observe_round(decoding(rows, 1), of_all, of_all, 10 + each * number)
    assert (latency.drafts(1), latency.drafts(8)) == (4, 0)
    fixed = LatencyModel(SMOLLM2, sizes._replace(adapts=False))
    assert (fixed.drafts(1), fixed.drafts(8)) == (4, 2)


def test_rounds_without_drafts_are_timed_by_step():
    """A program of four takes 40 ms, a round of one rejected draft 15: none should be drafted."""
    latency = LatencyModel(SMOLLM2, SIZES._replace(rows=(2,), drafts=(4,), adapts=True))
    for _ in range(20):
        number = latency.drafts(2, steps=True)
        plan = DecodePlan(2, 1 if number else 4, [], drafts=4 if number else 0)
        milliseconds = 10 + 5 * number if number else 40
        latency.observe_round(plan, [number] * 2, [0] * 2, milliseconds)
    assert latency.drafts(2, steps=True) == 0


def test_no_times_are_known_at_first():
    latency = LatencyModel(SMOLLM2, SIZES)
    assert latency.prefill(1, 512, 0) is None
    assert latency.step(8) is None
    assert latency.expected(prefill_plan(1, 512)) == latency.expected(decoding(8, 4)) == 0


def test_estimates_are_medians_that_ignore_one_slow_program():
    latency = LatencyModel(SMOLLM2, SIZES)
    for milliseconds in (300, 16, 24, 16):
        latency.observe(decoding(8, 8), milliseconds)
        latency.observe(prefill_plan(1, 512, 0), milliseconds)
    assert latency.step(8) == 2.5
    assert latency.prefill(1, 512, 0) == pytest.approx(20)
    for _ in range(NEWEST):
        latency.observe(decoding(8, 2), 14)
    assert latency.step(8) == 7
    assert latency.expected(decoding(8, 3)) == 21
    assert latency.expected(prefill_plan(1, 512)) == pytest.approx(20)


def test_replayed_chunks_are_not_timed_as_prefill():
    latency = LatencyModel(SMOLLM2, SIZES)
    latency.observe(prefill_plan(1, 512, replay=True), 1)
    assert latency.prefill(1, 512, 0) is None


def test_program_is_estimated_no_slower_per_token_than_smaller_ones():
    """Otherwise a size that was slow once might never be run again."""
    latency = LatencyModel(SMOLLM2, SIZES)
    latency.observe(prefill_plan(1, 2048), 4000)
    alone = latency.prefill(1, 64, 0)
    latency.observe(prefill_plan(1, 512), 10)
    four = 10 * (2048 + 2048**2 / 2 / latency._even) / (512 + 512**2 / 2 / latency._even)
    assert latency.prefill(1, 2048, 0) == pytest.approx(four)
    # no smaller size has been timed
    assert latency.prefill(1, 64, 0) == alone


def test_programs_of_other_sizes_are_as_slow_as_the_slowest_timed():
    latency = LatencyModel(SMOLLM2, SIZES)
    latency.observe(decoding(8, 1), 2)
    latency.observe(decoding(64, 1), 5)
    assert (latency.step(8), latency.step(16), latency.step(64)) == (2, 5, 5)
    latency.observe(prefill_plan(1, 512, 0), 10)
    assert latency.prefill(8, 512, 0) == pytest.approx(80)


def test_later_chunks_take_longer():
    """By the ratio of attention's arithmetic to that of the matrices; they are equal at position
    96.
    """
    config = replace(SMOLLM2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
    # 16·8·2·(2 + 1) + 3·16·n = 2·2·8·96 for n = 48
    latency = LatencyModel(replace(config, intermediate_size=48), SIZES)
    latency.observe(prefill_plan(1, 64, 0), 1 + 32 / 96)
    assert latency.prefill(1, 64, 96) == pytest.approx(2 + 32 / 96)
