"""Tests that blocks leave for host memory, and come back to prompts and rows with the same bits."""

import pytest

from jsparse.engine import runner, sizing
from jsparse.engine.scheduler import Scheduler
from jsparse.engine.sizes import EngineSizes
from jsparse.server.metrics import Metrics
from tests.support.marks import slow_except
from tests.support.planning import RULES, LatencyModel, seq
from tests.support.serving import asked, assert_at_rest, bits, greedy, tiny_llm, until
from tests.support.tiny import random_prompts

BEGINNING, *OTHERS = random_prompts((32, 9, 5, 17, 13), seed=5)
PROMPTS = [*(BEGINNING + ids for ids in OTHERS[:2]), *OTHERS[2:]]
LONG = greedy(50, ignore_eos=True)
# state of pages, of rows, and heads of different lengths
POLICIES = ("quest(budget=16)", "lfps(budget=0.3)", "snapkv(budget=8, window=4, pool=3)")
# four sequences need eight of the 17 page groups each; blocks have two
SCARCE = {"kv_cache_tokens": 136, "kv_offloading_size": 1, "ladder": ((0, 16),)}


@pytest.fixture(autouse=True)
def sequences_grow_by_a_page(monkeypatch):
    monkeypatch.setattr(sizing, "GROWTH_TOKENS", 8)


@pytest.fixture
def one_at_a_time(monkeypatch):
    monkeypatch.setattr(runner, "AT_A_TIME", 1)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("expression", slow_except(POLICIES, "quest(budget=16)"))
def test_preempted_rows_keep_the_bits(expression):
    """As for a request alone."""
    llm = tiny_llm(expression, **SCARCE)
    outs = llm.generate(PROMPTS, LONG)
    counters = llm.engine.counters
    preemptions = counters.preemptions
    assert preemptions > 0
    assert counters.blocks_in > preemptions  # several of each row
    for prompt, out in zip(PROMPTS, outs, strict=True):
        (alone,) = llm.generate([prompt], LONG)
        assert bits(alone) == bits(out)
    assert counters.preemptions == preemptions
    assert_at_rest(llm)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("expression", slow_except(["dense", *POLICIES], "quest(budget=16)"))
def test_returning_prompts_keep_the_bits(expression):
    """A prompt is computed, found in host memory, and found on the device."""
    llm = tiny_llm(expression, **SCARCE | {"kv_cache_tokens": 104})
    metrics, counters = Metrics(llm.engine, "tiny"), llm.engine.counters
    prompts, few = random_prompts((61, 60, 60), seed=7), greedy(8)
    outs = [llm.generate([prompt], few)[0] for prompt in prompts]
    state = llm.engine.add(asked(llm, prompts[0], few))
    until(llm, lambda: state.finished)
    back = counters.blocks_in
    outs += [state.output(), *llm.generate([prompts[0]], few)]
    assert [bits(out) for out in outs[3:]] == [bits(outs[0])] * 2
    cached = (61 - max(1, llm.engine.policy.window)) // 16 * 16
    assert [out.num_cached_tokens for out in outs] == [0, 0, 0, cached, cached]
    assert counters.blocks_in == back == cached // 16
    metrics.begun(state)
    values = {sample.name: sample.value for each in metrics.collect() for sample in each.samples}
    assert values["jsparse:prefix_cache_host_hits_total"] == cached
    config = llm.engine.params.config
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert values["jsparse:kv_offloading_in_bytes_total"] == cached * token
    assert values["jsparse:kv_offloading_out_bytes_total"] >= cached * token
    blocks = values["jsparse:kv_offloading_blocks"]
    assert cached // 16 <= blocks <= counters.blocks_out
    assert values["jsparse:kv_host_bytes"] == blocks * 16 * token
    assert_at_rest(llm)


@pytest.mark.slow
def test_returning_turns_read_their_conversation_from_host_memory():
    """Three conversations, of which one fits: at least the last turn's prompt is found."""
    options = SCARCE | {"batch_invariant": False, "decode_rows": [4], "max_model_len": 128}
    llms = [tiny_llm("dense", **options | {"kv_offloading_size": size}) for size in (1, 0)]
    talks, known = random_prompts((50, 51, 52), seed=9), [0, 0, 0]
    for _ in range(3):
        for nth, talk in enumerate(talks):
            (out,), (plain,) = (llm.generate([talk], greedy(17, ignore_eos=True)) for llm in llms)
            assert out.outputs[0].token_ids == plain.outputs[0].token_ids
            assert out.num_cached_tokens >= known[nth]
            known[nth] = len(talk) // 16 * 16
            talks[nth] = [*talk, *out.outputs[0].token_ids, 7, 8]
    computed, more = (llm.engine.counters.prefill_tokens for llm in llms)
    assert 2 * computed < more


@pytest.mark.slow
def test_preempted_requests_may_be_aborted():
    llm = tiny_llm("dense", **SCARCE)
    for nth, prompt in enumerate(PROMPTS):
        llm.engine.add(asked(llm, prompt, LONG), request_id=f"{nth}")
    until(llm, lambda: llm.engine.scheduler.preempted)
    assert llm.engine.scheduler.pool.pinned > 0
    for nth in range(4):
        llm.engine.abort(f"{nth}")
    until(llm, lambda: llm.engine.idle)
    assert_at_rest(llm)


@pytest.mark.parametrize(
    ("size", "rule"),
    [
        (3, "3: must be at most 2.0, the GiB of"),
        (2, "2: must be at most 2.0, the GiB of"),  # none would be left for copies in flight
        (1e-9, "1e-09: must be 0 or at least .*, the GiB of a block"),
    ],
)
def test_size_is_checked(monkeypatch, size, rule):
    monkeypatch.setattr(sizing, "available_host_bytes", lambda: 2**31)
    with pytest.raises(ValueError, match=f"kv_offloading_size={rule}"):
        tiny_llm("dense", kv_offloading_size=size)


def test_long_sequences_are_preempted_instead_of_waiting():
    """Room for 15 of 32 long sequences: the mean number of rows that decode concurrently."""
    assert _rows_side_by_side(host_blocks=0) <= 6
    assert 17 <= _rows_side_by_side(host_blocks=100) <= 32


def test_time_of_blocks_that_come_back_is_not_a_programs(monkeypatch):
    llm, timed, works = tiny_llm("dense", **SCARCE | {"kv_cache_tokens": 104}), [], []
    run = llm.engine._runner.run

    def noted(plan):
        pending = run(plan)
        works.extend((each.work, bool(plan.copies), nth) for nth, each in enumerate(pending))
        return pending

    monkeypatch.setattr(llm.engine._runner, "run", noted)
    monkeypatch.setattr(llm.engine._latency, "observe", lambda work, took: timed.append(id(work)))
    prompts = random_prompts((61, 60, 60), seed=7)
    for prompt in [*prompts, prompts[0]]:
        del works[:], timed[:]
        llm.generate([prompt], greedy(2))
    (back,) = [id(work) for work, copies, nth in works if copies and nth == 0]
    assert back not in timed


def _rows_side_by_side(host_blocks):
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
        host_blocks=host_blocks,
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
