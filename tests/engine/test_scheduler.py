"""Tests the scheduler on simulated events: no lost memory, no wrong plan, no starvation."""

import pytest

from jsparse.engine.scheduler import Scheduler
from jsparse.engine.sizes import MAX_PREFILLS
from jsparse.engine.stall_budget import MARGIN
from jsparse.runtime.draft_length import Remaining
from tests.support.marks import slow_except
from tests.support.planning import (
    LATENCY,
    PACKED,
    RULES,
    SIZES,
    UNHURRIED,
    VARIANT,
    LatencyModel,
    chunks_of,
    seq,
    served,
    took,
)
from tests.support.random_events import (
    MACHINES,
    Drafting,
    OffloadingCompressed,
    Scarce,
    Variant,
    run_events,
)

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "machine", slow_except(MACHINES, Scarce, Variant, Drafting, OffloadingCompressed)
)
def test_random_events(machine):
    run_events(machine, 30, 60)


def test_shortest_prompt_is_prefilled_first_without_starvation():
    scheduler = Scheduler(SIZES, RULES, LATENCY)
    scheduler.add(seq(0, range(50), 1))
    scheduler.add(seq(1, range(100, 103), 1))
    assert served(scheduler)[0] == [1, 0]
    scheduler = Scheduler(SIZES, RULES, LATENCY)
    scheduler.add(seq(0, range(50), 1, arrival=0.0))
    # it arrived later by more than the long one's extra length
    scheduler.add(seq(1, range(100, 103), 1, arrival=0.01))
    assert served(scheduler)[0] == [0, 1]


def test_urgent_prompts_start_first():
    """A smaller priority overtakes shorter prompts, and prompts in prefill."""
    scheduler = Scheduler(SIZES, RULES, LATENCY)
    scheduler.add(seq(0, range(100, 103), 1))
    scheduler.add(seq(1, range(50), 1, priority=-1))
    scheduler.add(seq(2, range(200, 240), 1, priority=-2))
    assert served(scheduler)[0] == [2, 1, 0]


def test_short_prompt_overtakes_a_long_prefill():
    scheduler = Scheduler(SIZES, RULES, LATENCY)
    scheduler.add(seq(0, range(55), 1))
    chunks = chunks_of(scheduler.plan())
    scheduler.add(seq(1, range(100, 103), 1))
    chunks += chunks_of(*(scheduler.plan() for _ in range(2)))
    assert [(chunk.seq, chunk.start) for chunk in chunks] == [(0, 0), (1, 0), (0, 16)]


def test_programs_are_long_only_if_no_request_waits_for_their_end():
    scheduler = Scheduler(SIZES._replace(max_stall_ms=16), RULES._replace(periods=()), LATENCY)
    scheduler.add(seq(0, range(4), 30))
    scheduler.add(seq(1, range(100, 134), 30))
    plans = served(scheduler)[1]
    steps = [plan.decode.steps for plan in plans if plan.decode is not None]
    prefill = [plan for plan in plans if plan.prefill is not None and not plan.prefill.last]
    assert {plan.decode.steps for plan in prefill if plan.decode is not None} == {1}
    after = steps[-8:]
    # at most the remaining steps of the longest row
    assert after[-4:] == [8, 8, 8, 5]


def test_two_programs_stall_rows_no_longer_than_allowed():
    for maximum, step, longest in (
        (16, 1, 8),
        (16, 3, 2),
        (16, None, 1),
        (16, 0, 8),
        (0, 1, 1),
        (None, 1, 8),
        (None, 30, 3),
    ):
        sizes, rules = SIZES._replace(max_stall_ms=maximum), RULES._replace(periods=())
        scheduler = Scheduler(sizes, rules, LatencyModel(step=step))
        scheduler.add(seq(0, range(4), 30))
        plans = [plan.decode for plan in served(scheduler)[1] if plan.decode is not None]
        assert max(plan.steps for plan in plans) == longest, (maximum, step)


def test_round_stalls_rows_no_longer_than_allowed():
    sizes = VARIANT._replace(max_stall_ms=100, drafts=(3, 3), max_model_len=512, num_groups=300)
    latency = LatencyModel(lambda rows, size, start: 20, step=10)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), latency)
    row = seq(0, range(4), 200)
    scheduler.add(row)
    while scheduler.prefilling or scheduler.waiting:
        scheduler.plan()
    scheduler.add(seq(1, range(1000, 1400), 1))
    now = decoded = longest = 0.0
    while scheduler.prefilling or scheduler.waiting:
        plan = scheduler.plan()
        now += 20 * (plan.prefill is not None)
        if plan.decode is not None:
            now += 10
            longest, decoded = max(longest, now - decoded), now
            scheduler.record_tokens(row, plan.decode.rows[0].steps, 1)
    assert 50 <= longest <= 100


def test_rows_are_seen_unless_others_wait_for_their_slots():
    """What they still want and the acceptance of their drafts determine the number of drafts."""
    latency, seen = LatencyModel(), []
    latency.drafts = lambda rows, remaining, *, steps: seen.append(remaining) or 3
    sizes = UNHURRIED._replace(num_slots=2, rows=(2,), prefill_rows=(1,), drafts=(3,))
    scheduler = Scheduler(sizes, RULES._replace(periods=()), latency)
    seqs = [seq(number, range(100 * number, 100 * number + 4), 5 + number) for number in range(3)]
    for each in seqs:
        scheduler.add(each)
    while scheduler.waiting or scheduler.prefilling:
        plan = scheduler.plan()
        for row in plan.decode.rows if plan.decode else ():
            scheduler.record_tokens(seqs[row.seq], row.steps, row.steps)
            if seqs[row.seq].planned == seqs[row.seq].max_tokens:
                scheduler.stop(seqs[row.seq])
    of_all = [Remaining(1, seqs[1].acceptance), Remaining(6, seqs[2].acceptance)]
    assert seen == [[], of_all]


def test_programs_are_shorter_while_requests_wait_for_slots():
    sizes = UNHURRIED._replace(num_slots=1, rows=(1,), prefill_rows=(1,), steps=20)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), LATENCY)
    for number in range(2):
        scheduler.add(seq(number, range(100 * number, 100 * number + 4), 31))
    plans = [plan.decode.steps for plan in served(scheduler)[1] if plan.decode is not None]
    assert plans == [8, 8, 8, 6, 20, 10]


def test_few_prompts_are_partly_prefilled():
    sizes = SIZES._replace(num_groups=197, num_slots=10, rows=(10,))
    scheduler = Scheduler(sizes, RULES, LATENCY)
    for number in range(MAX_PREFILLS + 1):
        # each has waited longer than those before it
        ids = range(100 * number, 100 * number + 50)
        scheduler.add(seq(number, ids, 1, arrival=-0.01 * number))
        (chunk,) = chunks_of(scheduler.plan())
        assert chunk.seq == min(number, MAX_PREFILLS - 1)


def test_predicted_chunks_of_a_prompt_are_those_planned():
    for tokens in range(1, 60):
        scheduler = Scheduler(SIZES, RULES, LATENCY)
        scheduler.add(seq(0, range(tokens), 1))
        planned = []
        while (prefill := scheduler.plan().prefill) is not None:
            planned.append((prefill.size, prefill.last))
        assert SIZES.chunks(0, tokens) == planned, tokens


def test_large_chunks_have_little_padding():
    """The rest of a prompt is prefilled in smaller chunks, unless these are small already."""
    sizes = VARIANT._replace(
        ladder=((0, 512), (4096, 2048), (8192, 8192)), tails=(64, 256, 1024), block_tokens=512
    )
    assert [size for size, _ in sizes.chunks(24_576, 30_720)] == [2048] * 3
    assert sizes.chunks(24_576, 24_576 + 7168) == [(8192, True)]
    assert sizes.chunks(24_576, 24_576 + 7167) == [(2048, False)] * 3 + [(1024, True)]
    assert sizes.chunks(8192, 8192 + 1025) == [(2048, True)]
    alone = sizes._replace(ladder=((0, 4096),))
    assert alone.chunks(0, 3000) == [(4096, True)]
    promised = sizes._replace(batch_invariant=True)
    assert promised.chunks(24_576, 30_720) == [(8192, True)]


def test_few_rows_decode_in_the_smallest_sufficient_program():
    sizes = SIZES._replace(rows=(1, 2, 6))
    assert [sizes.rows_for(count) for count in range(1, 7)] == [1, 2, 6, 6, 6, 6]


def test_programs_compute_only_decoding_rows_in_any_slots():
    scheduler = Scheduler(PACKED, RULES, LATENCY)
    for number, tokens in enumerate((2, 2, 30)):
        scheduler.add(seq(number, range(100 * number, 100 * number + 3), tokens))
    plans = [plan.decode for plan in served(scheduler)[1] if plan.decode is not None]
    assert [(plan.num_rows, len(plan.rows)) for plan in plans][:3] == [(6, 3), (2, 1), (2, 1)]
    assert plans[-1].rows[0].slot == 2
    # while the program of few rows is not ready
    scheduler = Scheduler(PACKED, RULES, LATENCY, rows_for=lambda count: 6)
    scheduler.add(seq(0, range(3), 3))
    last = [plan.decode for plan in served(scheduler)[1] if plan.decode is not None]
    assert {plan.num_rows for plan in last} == {6}


def test_short_prompts_are_prefilled_together_if_they_fill_half_of_a_program():
    def read(*lengths):
        scheduler = Scheduler(PACKED, RULES, LATENCY)
        for number, length in enumerate(lengths):
            scheduler.add(seq(number, range(100 * number, 100 * number + length), 1))
        plans = [plan.prefill for plan in served(scheduler)[1] if plan.prefill is not None]
        return [(plan.num_rows, plan.size, [c.seq for c in plan.chunks]) for plan in plans]

    assert read(4, 4, 4, 4) == [(3, 4, [0, 1, 2]), (1, 4, [3])]
    # 16 of 48 would be too few, 16 of 32 are enough; chunks of other sizes do not combine
    assert read(8, 8) == [(2, 8, [0, 1])]
    assert read(3, 10) == [(1, 4, [0]), (1, 16, [1])]
    # their first chunks are equal, and their second
    assert read(18, 18) == [(2, 16, [0, 1]), (2, 4, [0, 1])]


def test_common_prefix_of_concurrent_prompts_is_prefilled_once():
    scheduler = Scheduler(PACKED, RULES, LATENCY)
    for number in range(2):
        scheduler.add(seq(number, [*range(16), 100 + number, 1, 2], 1))
    plans = [plan.prefill for plan in served(scheduler)[1] if plan.prefill is not None]
    assert [len(plan.chunks) for plan in plans] == [1, 2]
    assert {chunk.start for chunk in plans[1].chunks} == {16}


def steps_between(sizes, latency=LATENCY):
    """The milliseconds of prefill before each decode step, and the chunk sizes."""
    scheduler = Scheduler(sizes, RULES._replace(periods=()), latency)
    scheduler.add(seq(0, range(4), 30))
    scheduler.plan()
    scheduler.add(seq(1, range(100, 155), 5))
    stalls, stall, chunks = [], 0, []
    while (plan := scheduler.plan()).prefill is not None:
        prefill = plan.prefill
        chunks.append(prefill.size)
        stall += took(prefill.num_rows, prefill.size, prefill.chunks[0].start)
        if plan.decode is not None:
            stalls.append(stall)
            stall = 0
    return stalls, chunks


def test_prefill_stalls_decoding_no_longer_than_allowed():
    # chunks of 16 take 16 and 24 ms, those of 8 from position 32 on 16, 18 and 20, a step 1; they
    # must finish within 40 and 41 ms
    assert steps_between(SIZES) == ([16, 24, 16, 18, 20], [16, 16, 8, 8, 8])
    assert steps_between(SIZES._replace(max_stall_ms=40 / MARGIN))[0] == [16, 24, 34, 20]
    assert steps_between(SIZES._replace(max_stall_ms=41.01 / MARGIN)) == (
        [40, 34, 20],
        [16, 16, 8, 8, 8],
    )
    stalls, chunks = steps_between(SIZES._replace(max_stall_ms=None))
    assert (stalls, chunks) == ([94], [16, 16, 8, 8, 8])


def test_chunks_shrink_to_the_stall_budget():
    # 8 from position 16 on take 12 and 14 ms, where 16 would take 24
    stalls, chunks = steps_between(VARIANT._replace(max_stall_ms=21))
    assert chunks == [16, 8, 8, 8, 8, 8]
    assert stalls == [16, 12, 14, 16, 18, 20]
    # one at a time while no times are known
    assert (
        steps_between(VARIANT._replace(max_stall_ms=20), LatencyModel(lambda *_: None))[1]
        == [8] * 7
    )


def test_all_prompts_are_prefilled_first_without_a_stall_budget():
    scheduler = Scheduler(UNHURRIED, RULES._replace(periods=()), LATENCY)
    for number in range(3):
        scheduler.add(seq(number, range(100 * number, 100 * number + 20), 5))
    plans = served(scheduler)[1]
    first = next(nth for nth, plan in enumerate(plans) if plan.decode is not None)
    assert len(plans[first].decode.rows) == 3
    assert not any(plan.prefill for plan in plans[first + 1 :])


def test_cache_shares_all_tokens_of_a_sequence_but_the_newest():
    """Of 7 and 9 tokens 15 are in the cache, which fill one block of 8."""
    for shares, shared in ((True, 8), (False, 0)):
        rules = RULES._replace(periods=(), window=0, shares_generated=shares)
        scheduler = Scheduler(VARIANT, rules, LATENCY)
        first = seq(0, range(7), 20)
        scheduler.add(first)
        while first.planned < 9:
            scheduler.plan()
        scheduler.stop(first, range(7, 16))
        further = seq(1, range(20), 1)
        scheduler.add(further)
        scheduler.plan()
        assert further.cached_tokens == shared, shares
