"""Tests that sequences are swapped out for others and back in with the same bits."""

import pytest

from jsparse.engine import runner, sizing
from jsparse.engine.scheduler import Scheduler
from jsparse.engine.sizes import EngineSizes
from tests.support.marks import slow_except
from tests.support.planning import RULES, LatencyModel, seq
from tests.support.serving import asked, assert_at_rest, bits, greedy, tiny_llm, until
from tests.support.tiny import random_prompts

BEGINNING, *OTHERS = random_prompts((32, 9, 5, 17, 13), seed=5)
PROMPTS = [*(BEGINNING + ids for ids in OTHERS[:2]), *OTHERS[2:]]
LONG = greedy(50, ignore_eos=True)
# state of pages, of rows, and heads of different lengths
POLICIES = ("quest(budget=16)", "lfps(budget=0.3)", "snapkv(budget=8, window=4, pool=3)")
# four sequences need eight of the 17 page groups each
SCARCE = {"kv_cache_tokens": 136, "swap_space": 1}


@pytest.fixture(autouse=True)
def sequences_grow_by_a_page(monkeypatch):
    monkeypatch.setattr(sizing, "GROWTH_TOKENS", 8)


def moves_of(llm, prompts):
    """Results of requests, and the swaps of sequences meanwhile."""
    moved, run = [], llm.engine._runner.run
    llm.engine._runner.run = lambda plan: moved.append(plan) or run(plan)
    outs = llm.generate(prompts, LONG)
    llm.engine._runner.run = run
    return outs, *(
        [m for p in moved for m in getattr(p, name)] for name in ("swapped_out", "swapped_in")
    )


@pytest.mark.parametrize("expression", slow_except(POLICIES, "quest(budget=16)"))
def test_swapping_keeps_the_bits(expression, monkeypatch):
    """As for a request alone. Sequences are swapped in parts of two groups, a few at a time.

    Their common prefix stays on the device if the policy shares such a short one.
    """
    monkeypatch.setattr(sizing, "MOVED_GROUPS", 2)
    monkeypatch.setattr(runner, "AT_A_TIME", 1)
    llm = tiny_llm(expression, **SCARCE)
    outs, swapped, swapped_in = moves_of(llm, PROMPTS)
    assert len(swapped) == len(swapped_in) == llm.engine.counters.preemptions > 0
    assert any(move.first for move in swapped) == (not llm.engine.policy.window)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        (alone,), moved, _ = moves_of(llm, [prompt])
        assert not moved
        assert bits(alone) == bits(out)
    assert_at_rest(llm)
    assert not llm.engine._runner._swapped


@pytest.mark.slow
def test_swapped_requests_may_be_aborted():
    llm = tiny_llm("dense", **SCARCE)
    for nth, prompt in enumerate(PROMPTS):
        llm.engine.add(asked(llm, prompt, LONG), request_id=f"{nth}")
    until(llm, lambda: llm.engine.scheduler.swapped)
    assert llm.engine._runner._swapped
    for nth in range(4):
        llm.engine.abort(f"{nth}")
    until(llm, lambda: llm.engine.idle)
    assert_at_rest(llm)
    assert not llm.engine._runner._swapped


def test_swap_space_is_checked(monkeypatch):
    monkeypatch.setattr(sizing, "available_host_bytes", lambda: 2**31)
    with pytest.raises(ValueError, match=r"swap_space=3: must be at most 2.0, the GiB of host"):
        tiny_llm("dense", swap_space=3)


def test_long_sequences_are_swapped_instead_of_waiting():
    """Room for 15 of 32 long sequences: the mean number of rows that decode concurrently."""
    assert _rows_side_by_side(host_groups=0) <= 6
    assert 17 <= _rows_side_by_side(host_groups=800) <= 32


def _rows_side_by_side(host_groups):
    sizes = EngineSizes(
        num_slots=32,
        max_model_len=640,
        page_size=16,
        num_groups=601,
        ladder=((0, 128),),
        tails=(),
        block_tokens=128,
        steps=8,
        rows=(32,),
        growth_tokens=16,
        host_groups=host_groups,
    )
    scheduler = Scheduler(sizes, RULES._replace(root=None, periods=()), LatencyModel())
    for number in range(32):
        scheduler.add(seq(number, range(128), 512))
    steps = rows = 0
    for _ in range(10_000):
        plan = scheduler.plan()
        if plan.decode is not None:
            steps += plan.decode.steps
            rows += sum(row.steps for row in plan.decode.rows)
    assert scheduler.idle
    return rows / steps
