"""Tests the memory of sequences: shared prefixes, growth and admission."""

from collections import Counter

import pytest

from jsparse.engine.scheduler import Scheduler
from tests.support.planning import (
    ALONE,
    LATENCY,
    PACKED,
    RULES,
    SIZES,
    VARIANT,
    chunks_of,
    seq,
    served,
)

pytestmark = pytest.mark.pure


def test_cached_prefix_is_not_prefilled_again():
    scheduler = Scheduler(SIZES, RULES, LATENCY)
    prompt = list(range(40))
    for number in range(3):
        scheduler.add(seq(number, [*prompt, 100 + number], 2))
    chunks = chunks_of(*served(scheduler)[1])
    read = Counter()
    for chunk in chunks:
        read[chunk.seq] += chunk.valid
    # 39 are cached, two must remain for the window, and a chunk starts at 32
    assert sorted(read.values()) == [9, 9, 41]


def test_overtaken_prompt_skips_blocks_cached_since():
    """It restarts from the initial state, because its state has not seen the skipped tokens."""
    scheduler = Scheduler(SIZES, RULES, LATENCY)
    prompt = list(range(55))
    scheduler.add(seq(0, prompt, 1))
    scheduler.plan()
    scheduler.add(seq(1, [*prompt[:40], 100, 101], 1))
    chunks = chunks_of(*served(scheduler)[1])
    assert [(chunk.seq, chunk.start, chunk.fresh) for chunk in chunks] == [
        (1, 16, True),
        (1, 32, False),
        (1, 40, False),
        (0, 40, True),
        (0, 48, False),
    ]


def test_reused_blocks_are_not_counted_as_room_for_the_rest():
    scheduler = Scheduler(SIZES._replace(num_groups=13), RULES, LATENCY)
    prompt = list(range(17))
    scheduler.add(seq(0, prompt, 1))
    served(scheduler)
    assert scheduler.pool.idle_groups == 4
    scheduler.add(seq(1, range(100, 110), 6))
    scheduler.plan()
    scheduler.add(seq(2, [*prompt, *range(200, 220)], 3))
    scheduler.plan()
    assert [held.number for held in scheduler.prefilling] == []
    assert served(scheduler)[0] == [2]


def test_compressed_prompt_frees_its_groups():
    """Of 8 groups 6 hold the prompt and 2 the compressed rows; the next one starts after that."""
    sizes = SIZES._replace(num_groups=9, evicted_pages=2, growth_tokens=4)
    rules = RULES._replace(slots=lambda prompt, new: min(prompt + new, 8))
    scheduler = Scheduler(sizes, rules, LATENCY)
    for number in range(2):
        scheduler.add(seq(number, range(100 * number, 100 * number + 24), 30))
    with pytest.raises(ValueError, match=r"must fit in the 32 tokens"):
        scheduler.add(seq(2, range(28), 30))
    plans = [scheduler.plan() for _ in range(3)]
    first, last = chunks_of(plans[0])[0], chunks_of(plans[1])[0]
    assert len(first.groups) == 6 and not first.kept
    assert len(last.kept) == 2 and not {*last.kept} & {*last.groups}
    assert [held.number for held in scheduler.decoding] == [0]
    assert scheduler.decoding[0].groups == last.kept
    # six groups are free; the other needs eight until it decodes
    assert not scheduler.prefilling and len(scheduler.waiting) == 1
    assert scheduler.pool.available == 6


def test_window_of_a_prompt_is_always_prefilled():
    scheduler = Scheduler(SIZES, RULES._replace(window=20), LATENCY)
    for number in range(2):
        scheduler.add(seq(number, range(48), 2))
    starts = {}
    for chunk in chunks_of(*served(scheduler)[1]):
        starts.setdefault(chunk.seq, chunk.start)
    # 28 tokens may be shared, and a chunk starts at 16
    assert sorted(starts.values()) == [0, 16]


def test_sequence_that_does_not_fit_waits_and_blocks_later_ones_from_its_memory():
    scheduler = Scheduler(SIZES._replace(num_groups=17), RULES, LATENCY)
    scheduler.add(seq(0, range(40), 8))
    scheduler.plan()
    scheduler.add(seq(1, range(100, 130), 2))
    scheduler.add(seq(2, range(200, 231), 2))
    order, _ = served(scheduler)
    assert order == [0, 1, 2]


def test_sequence_that_can_never_fit_is_refused():
    scheduler = Scheduler(SIZES._replace(num_groups=8), RULES, LATENCY)
    with pytest.raises(ValueError, match="is 65: must be at most max_model_len=64"):
        scheduler.add(seq(0, range(60), 5))
    with pytest.raises(ValueError, match="is 35: must fit in the 28 tokens of the engine"):
        scheduler.add(seq(0, range(30), 5))
    assert scheduler.idle


def test_prefill_resumes_after_any_block_where_chunks_may_start_anywhere():
    def read(sizes):
        scheduler = Scheduler(sizes, RULES, LATENCY)
        scheduler.add(seq(0, range(30), 1))
        served(scheduler)
        scheduler.add(seq(1, [*range(29), 100, 101], 1))
        return [chunk.start for chunk in chunks_of(*served(scheduler)[1])]

    assert read(ALONE) == [16]
    assert read(VARIANT) == [24]


def test_sequences_grow_into_memory_unused_by_others():
    """If each reserved the memory of all its tokens, four could not run together."""
    sizes = PACKED._replace(num_groups=21, growth_tokens=8, steps=4)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), LATENCY)
    for number in range(4):
        scheduler.add(seq(number, range(100 * number, 100 * number + 4), 40))
    running, sent = [], []
    for _ in range(200):
        plan = scheduler.plan()
        running.append(len(scheduler.decoding))
        if plan.decode is not None:
            sent.append([row.seq for row in plan.decode.rows])
        if scheduler.idle:
            break
    assert scheduler.idle
    assert max(running) == 4
    # three groups each leave five of twenty: one may grow to its full length, the others wait
    assert [0, 1, 2, 3] in sent
    assert any(len(rows) < 4 for rows in sent[: len(sent) // 2])


def test_shared_blocks_are_free_after_their_last_user_finishes():
    sizes = PACKED._replace(num_groups=21, growth_tokens=4, steps=1)
    scheduler = Scheduler(sizes, RULES._replace(periods=(), window=0), LATENCY)
    prefix = list(range(32))
    # few groups of 14; 10 of 12; 2 of 4 beside 8 that it shares with the second
    for number, (prompt, tokens) in enumerate(
        ((range(100, 104), 52), ([*prefix, 200], 12), ([*prefix, 300], 12))
    ):
        scheduler.add(seq(number, prompt, tokens))
        while len(scheduler.decoding) <= number:
            assert scheduler.plan().prefill is not None
    served(scheduler)
    assert scheduler.idle


def test_no_sequence_starts_if_it_could_deadlock_the_running_ones():
    sizes = PACKED._replace(num_groups=13, growth_tokens=4)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), LATENCY)
    # 12 groups: each has 5 and needs 9, so that two would deadlock
    for number in range(2):
        scheduler.add(seq(number, range(100 * number, 100 * number + 16), 20))
    scheduler.plan()
    assert len(scheduler.waiting) == 1
    assert served(scheduler)[0] == [1]
    assert scheduler.idle


def test_preempted_sequence_gets_its_blocks_back_wherever_they_are():
    """Of 16 groups, three rows of 32 tokens and more need 8 each that they share and 8 of their
    own.
    """
    sizes = VARIANT._replace(num_groups=25, host_blocks=99, growth_tokens=4, steps=1)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), LATENCY)
    for number in range(3):
        scheduler.add(seq(number, [*range(34), number], 29))
    plans = served(scheduler)[1]
    copies = [copy for plan in plans for copy in [*plan.copies, *plan.late_copies]]
    resumed = [row for plan in plans for row in plan.resumed]
    assert resumed
    # the shared blocks of two groups never leave, since others decode with them
    shared = set(resumed[0].groups[:8])
    assert copies
    assert not any(shared & {*copy.groups} for copy in copies)
    assert all(set(row.groups[:8]) == shared for row in resumed)


def test_preempted_sequence_resumes_without_copies_if_nothing_took_its_groups():
    sizes = VARIANT._replace(num_groups=25, host_blocks=99)
    scheduler = Scheduler(sizes, RULES, LATENCY)
    row = seq(0, range(20), 20)
    scheduler.add(row)
    while row.planned < 4:
        scheduler.plan()
    before, memory = row.groups, scheduler.memory
    memory.preempt(row)
    assert scheduler.pool.available == scheduler.pool.size
    assert scheduler.pool.pinned == 5  # for 40 tokens
    assert memory.resume(row, 0)
    assert row.groups == before
    assert scheduler.pool.take_copies() == []


def test_prompt_is_found_in_host_memory():
    """Each prompt needs 11 of 12 groups. Of its 40 tokens, the last two must be computed.

    Three blocks make room for the four that come back, and two more for the rest.
    """
    scheduler = Scheduler(VARIANT._replace(num_groups=13, host_blocks=9), RULES, LATENCY)
    seqs = [seq(number, ids, 2) for number, ids in enumerate((range(40), range(100, 140)))]
    for each in (*seqs, again := seq(2, range(40), 2)):
        scheduler.add(each)
        plans = served(scheduler)[1]
    assert [each.cached_tokens for each in (*seqs, again)] == [0, 0, 32]
    assert again.host_tokens == 32
    assert [copy.out for copy in plans[0].copies] == [True] * 3 + [False] * 4 + [True] * 2


def test_rows_that_host_memory_cannot_hold_finish_one_at_a_time():
    """Two rows grow to 16 of 28 groups, and host memory has places for four."""
    sizes = VARIANT._replace(num_groups=29, host_blocks=2, growth_tokens=4, steps=1)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), LATENCY)
    for number in range(2):
        scheduler.add(seq(number, range(100 * number, 100 * number + 4), 60))
    plans = served(scheduler)[1]
    assert scheduler.idle
    assert not any(plan.preempted for plan in plans)


def test_preempted_sequence_that_ends_leaves_host_memory():
    sizes = VARIANT._replace(num_groups=25, host_blocks=99, growth_tokens=4)
    scheduler = Scheduler(sizes, RULES._replace(root=None, periods=()), LATENCY)
    for number in range(3):
        scheduler.add(seq(number, range(20), 40))
    while not scheduler.preempted:
        scheduler.plan()
    scheduler.plan()
    assert scheduler.pool.used_places > 0
    for row in [*scheduler.preempted]:
        scheduler.stop(row)
    scheduler.plan()
    assert (scheduler.pool.pinned, scheduler.pool.used_places) == (0, 0)
