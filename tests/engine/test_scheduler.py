"""Tests the scheduler by simulated events: no memory is lost, no plan is wrong, nobody starves."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jsparse.engine.scheduler import Scheduler
from jsparse.engine.sizes import MAX_READING, EngineSizes, Rules
from jsparse.engine.step_plan import Answer, Phase

pytestmark = pytest.mark.pure

SIZES = EngineSizes(
    num_slots=6,
    max_model_len=64,
    page_size=4,
    num_groups=49,
    ladder=((0, 16), (32, 8)),
    tails=(4,),
    block_tokens=8,
    steps=8,
    rows=(2, 6),
    prefill_rows=(1, 2, 3),
    max_stall_ms=0,
    batch_invariant=True,
)
# as an engine has them whose programs depend on the company, and where nobody waits for a token
VARIANT = SIZES._replace(batch_invariant=False)
UNHURRIED = VARIANT._replace(max_stall_ms=None)
PACKED = SIZES._replace(max_stall_ms=60)
ALONE = SIZES._replace(prefill_rows=(1,))
RULES = Rules(root="root", window=2, replays=False, periods=(3,))


def took(rows, size, start):
    """How long programs take to read, in milliseconds."""
    return rows * size * (1 + start / 32)


class Pace:
    """Knows how long programs take, or only how long steps do."""

    def __init__(self, reading=took, step=1):
        self.reading, self.step = reading, lambda rows: step


PACE = Pace()


def answer(number, prompt, tokens, born=0.0):
    return Answer(number, np.array(prompt, np.int32), tokens, born)


class Serving(RuleBasedStateMachine):
    """Adds, stops and plans at random; a model of the device follows each plan."""

    replays, sizes = False, PACKED

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(self.sizes, RULES._replace(replays=self.replays), PACE)
        self.asked, self.clock = [], 0.0
        # what a device would hold: per answer, the prompt's tokens in its groups, and its steps
        self.read, self.steps, self.slots, self.places = {}, Counter(), {}, {}
        self.tables = {}
        # the tokens that groups hold, and whether a whole chunk wrote them
        self.written = {}

    @rule(
        size=st.integers(1, 55),
        tokens=st.integers(1, 40),
        alphabet=st.integers(1, 2),
        seconds=st.floats(0, 0.002),
    )
    def add(self, size, tokens, alphabet, seconds):
        self.clock += seconds
        prompt = [(nth // 16) % alphabet for nth in range(size)]
        tokens = min(tokens, self.sizes.max_model_len - size)
        made = answer(len(self.asked), prompt, tokens, self.clock)
        self.scheduler.add(made)
        self.asked.append(made)

    @rule(nth=st.integers(0, 400))
    def stop(self, nth):
        if self.asked:
            self.scheduler.stop(self.asked[nth % len(self.asked)])

    @rule(times=st.integers(1, 6))
    def plan(self, times):
        for _ in range(times):
            self.follow(self.scheduler.plan())

    def follow(self, plan):
        if plan.reading is not None:
            self.follow_reading(plan.reading)
        if plan.decoding is None:
            return
        slots = [row.slot for row in plan.decoding.rows]
        assert 1 <= len(slots) == len(set(slots)) <= plan.decoding.num_rows
        assert plan.decoding.num_rows in self.sizes.rows
        for row in plan.decoding.rows:
            asked = self.asked[row.answer]
            assert self.slots[row.slot] == row.answer
            assert 1 <= row.steps <= plan.decoding.steps
            before = self.steps[row.answer] - 1
            self.steps[row.answer] += row.steps
            assert row.age == self.steps[row.answer] - 1
            assert self.steps[row.answer] <= asked.max_tokens
            # it has groups for all its tokens, and the device knows of them
            table = self.tables[row.answer]
            if row.groups:
                assert len(row.groups) <= self.sizes.growth
                assert row.first == len(table)
                table += row.groups
            assert table == asked.groups
            assert len(asked.ids) + row.age <= len(table) * SIZES.page_size
            # no program runs past a row's service
            assert all(before // every == (row.age - 1) // every for every in RULES.periods)

    def follow_reading(self, reading):
        assert 1 <= len(reading.chunks) <= reading.num_rows
        assert reading.num_rows in self.sizes.prefill_rows
        if reading.num_rows > 1:
            assert 2 * sum(c.valid for c in reading.chunks) >= reading.num_rows * reading.size
        for column in ("answer", "slot", "place"):
            assert len({getattr(chunk, column) for chunk in reading.chunks}) == len(reading.chunks)
        for chunk in reading.chunks:
            # a place is nobody else's while its prompt is partly read
            assert 0 <= chunk.place < MAX_READING
            assert chunk.fresh or self.places[chunk.answer] == chunk.place
            self.places[chunk.answer] = chunk.place
            self.follow_chunk(chunk, reading)

    def follow_chunk(self, chunk, reading):
        asked = self.asked[chunk.answer]
        assert not asked.stopped
        if self.sizes.batch_invariant:
            assert chunk.start == SIZES.chunk_start(chunk.start)
        assert chunk.start % SIZES.page_size == 0
        assert 1 <= chunk.valid <= reading.size <= SIZES.chunk_size(chunk.start)
        tokens = len(asked.ids) + min(asked.max_tokens, self.sizes.growth_tokens)
        assert len(chunk.groups) == len(set(chunk.groups)) == SIZES.groups_for(tokens)
        if not chunk.fresh:
            assert self.read[chunk.answer] == chunk.start
        # what it did not read itself is there: another has written these very tokens
        for at in range(0, chunk.start, SIZES.page_size):
            group = chunk.groups[at // SIZES.page_size]
            tokens, whole = self.written[group]
            assert tokens == asked.ids[: at + SIZES.page_size].tolist()
            assert whole
        end = chunk.start + chunk.valid
        assert not reading.replay or (self.replays and not reading.last)
        if self.replays:
            assert chunk.fresh == (chunk.start == 0)
        for at in range(chunk.start, end, SIZES.page_size):
            group = chunk.groups[at // SIZES.page_size]
            if reading.replay:
                assert self.written[group] == (asked.ids[: at + SIZES.page_size].tolist(), True)
                continue
            size = SIZES.chunk_size(chunk.start)
            whole = not self.sizes.batch_invariant or chunk.valid == size
            self.written[group] = asked.ids[: min(end, at + SIZES.page_size)].tolist(), whole
        if not reading.replay:
            for group in chunk.groups[-(-end // SIZES.page_size) :]:
                self.written.pop(group, None)
        self.read[chunk.answer] = end
        assert reading.last == (end == len(asked.ids))
        self.tables[chunk.answer] = list(chunk.groups)
        if reading.last:
            self.slots[chunk.slot] = chunk.answer
            self.steps[chunk.answer] = 1

    @invariant()
    def memory_is_accounted_for(self):
        scheduler, pool = self.scheduler, self.scheduler.pool
        live = [*scheduler.reading, *scheduler.decoding]
        blocks = Counter(block for held in live for block in held.blocks)
        own = [group for held in live for group in held.own]
        shared = [group for block in blocks for group in block.groups]
        assert len(own) == len(set(own))
        assert not set(own) & set(shared)
        assert len(own) + len(set(shared)) + pool.available == pool.size
        assert all(block.holders == count for block, count in blocks.items())
        slots = [held.slot for held in live]
        assert len(slots) == len(set(slots))
        places = [held.place for held in scheduler.reading if held.place >= 0]
        assert sorted([*places, *scheduler._places]) == list(range(MAX_READING))
        for held in live:
            tokens = len(held.ids) + max(0, held.sent - 1)
            groups = len(held.groups)
            assert SIZES.groups_for(tokens) <= groups
            assert groups <= SIZES.groups_for(len(held.ids) + held.max_tokens)

    def teardown(self):
        """Everything comes to an end, and all memory comes back."""
        for _ in range(100 * (len(self.asked) + 1)):
            if self.scheduler.idle:
                break
            self.follow(self.scheduler.plan())
        assert self.scheduler.idle
        assert self.scheduler.pool.available == self.scheduler.pool.size
        for asked in self.asked:
            assert asked.phase is Phase.ENDED
            if not asked.stopped:
                assert self.steps[asked.number] == asked.max_tokens


class Replaying(Serving):
    """The same, where states are built anew from what is shared."""

    replays = True


class Variant(Serving):
    """The same, where chunks begin anywhere and are as short as rows that decode need them."""

    sizes = VARIANT._replace(max_stall_ms=20, growth_tokens=8, num_groups=30)


class VariantReplaying(Variant):
    """Both."""

    replays = True


class Scarce(Serving):
    """The same, where memory is taken page by page, and there is but enough for one request."""

    sizes = PACKED._replace(growth_tokens=4, num_groups=17)


MACHINES = [Scarce, Serving, Replaying, Variant, VariantReplaying]


def run_events(machine, examples, steps):
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps)
    machine.TestCase("runTest").runTest()


@pytest.mark.parametrize("machine", MACHINES)
def test_random_events(machine):
    run_events(machine, 30, 60)


def served(scheduler, plans=1000):
    """The numbers of answers in the order in which their prompts were read, and all plans."""
    order, made = [], []
    for _ in range(plans):
        plan = scheduler.plan()
        made.append(plan)
        if plan.reading is not None and plan.reading.last:
            order += [chunk.answer for chunk in plan.reading.chunks]
        if scheduler.idle:
            break
    return order, made


def chunks_of(*plans):
    """The chunks that plans read."""
    return [chunk for plan in plans if plan.reading is not None for chunk in plan.reading.chunks]


def test_the_shortest_is_read_first_but_none_waits_forever():
    scheduler = Scheduler(SIZES, RULES, PACE)
    scheduler.add(answer(0, range(50), 1))
    scheduler.add(answer(1, range(100, 103), 1))
    assert served(scheduler)[0] == [1, 0]
    scheduler = Scheduler(SIZES, RULES, PACE)
    scheduler.add(answer(0, range(50), 1, born=0.0))
    # it came later by more than what the long one is longer
    scheduler.add(answer(1, range(100, 103), 1, born=0.01))
    assert served(scheduler)[0] == [0, 1]


def test_a_short_prompt_overtakes_a_long_one_that_is_being_read():
    scheduler = Scheduler(SIZES, RULES, PACE)
    scheduler.add(answer(0, range(55), 1))
    chunks = chunks_of(scheduler.plan())
    scheduler.add(answer(1, range(100, 103), 1))
    chunks += chunks_of(*(scheduler.plan() for _ in range(2)))
    assert [(chunk.answer, chunk.start) for chunk in chunks] == [(0, 0), (1, 0), (0, 16)]


def test_programs_are_long_only_where_nobody_waits_for_their_end():
    scheduler = Scheduler(SIZES._replace(max_stall_ms=16), RULES._replace(periods=()), PACE)
    scheduler.add(answer(0, range(4), 30))
    scheduler.add(answer(1, range(100, 134), 30))
    plans = served(scheduler)[1]
    steps = [plan.decoding.steps for plan in plans if plan.decoding is not None]
    reading = [plan for plan in plans if plan.reading is not None and not plan.reading.last]
    assert {plan.decoding.steps for plan in reading if plan.decoding is not None} == {1}
    after = steps[-8:]
    # and no longer than the longest row has steps left
    assert after[-4:] == [8, 8, 8, 5]


@pytest.mark.parametrize(
    ("maximum", "step", "longest"),
    [(16, 1, 8), (16, 3, 2), (16, None, 1), (16, 0, 8), (0, 1, 1), (None, 1, 8), (None, 30, 3)],
)
def test_two_programs_take_no_longer_than_rows_may_wait(maximum, step, longest):
    sizes, rules = SIZES._replace(max_stall_ms=maximum), RULES._replace(periods=())
    scheduler = Scheduler(sizes, rules, Pace(step=step))
    scheduler.add(answer(0, range(4), 30))
    plans = [plan.decoding for plan in served(scheduler)[1] if plan.decoding is not None]
    assert max(plan.steps for plan in plans) == longest


def test_programs_are_shorter_while_requests_wait_for_slots():
    sizes = UNHURRIED._replace(num_slots=1, rows=(1,), prefill_rows=(1,), steps=20)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), PACE)
    for number in range(2):
        scheduler.add(answer(number, range(100 * number, 100 * number + 4), 31))
    plans = [plan.decoding.steps for plan in served(scheduler)[1] if plan.decoding is not None]
    assert plans == [8, 8, 8, 6, 20, 10]


def test_rows_meet_their_service():
    scheduler = Scheduler(UNHURRIED, RULES._replace(periods=(10,)), PACE)
    scheduler.add(answer(0, range(4), 40))
    plans = [plan.decoding for plan in served(scheduler)[1] if plan.decoding is not None]
    ages = [row.age for plan in plans for row in plan.rows]
    assert {10, 20, 30} <= set(ages)
    assert ages[:4] == [8, 10, 18, 20]


def test_what_others_have_read_is_not_read_again():
    scheduler = Scheduler(SIZES, RULES, PACE)
    prompt = list(range(40))
    for number in range(3):
        scheduler.add(answer(number, [*prompt, 100 + number], 2))
    chunks = chunks_of(*served(scheduler)[1])
    read = Counter()
    for chunk in chunks:
        read[chunk.answer] += chunk.valid
    # 39 may be taken over, so that two are left for the window, and a chunk begins at 32
    assert sorted(read.values()) == [9, 9, 41]


def test_who_is_overtaken_goes_on_behind_what_others_have_read_since():
    """With a state that has seen nothing: it has not seen what lies between."""
    scheduler = Scheduler(SIZES, RULES, PACE)
    prompt = list(range(55))
    scheduler.add(answer(0, prompt, 1))
    scheduler.plan()
    scheduler.add(answer(1, [*prompt[:40], 100, 101], 1))
    chunks = chunks_of(*served(scheduler)[1])
    assert [(chunk.answer, chunk.start, chunk.fresh) for chunk in chunks] == [
        (1, 16, True),
        (1, 32, False),
        (1, 40, False),
        (0, 40, True),
        (0, 48, False),
    ]


def test_no_more_than_a_few_prompts_are_partly_read():
    sizes = SIZES._replace(num_groups=197, num_slots=10, rows=(10,))
    scheduler = Scheduler(sizes, RULES, PACE)
    for number in range(MAX_READING + 1):
        # each has waited for longer than those before
        ids = range(100 * number, 100 * number + 50)
        scheduler.add(answer(number, ids, 1, born=-0.01 * number))
        (chunk,) = chunks_of(scheduler.plan())
        assert chunk.answer == min(number, MAX_READING - 1)


def test_blocks_that_a_request_takes_over_are_not_counted_as_room_for_the_rest():
    scheduler = Scheduler(SIZES._replace(num_groups=13), RULES, PACE)
    prompt = list(range(17))
    scheduler.add(answer(0, prompt, 1))
    served(scheduler)
    assert scheduler.pool.cached == 4
    scheduler.add(answer(1, range(100, 110), 6))
    scheduler.plan()
    scheduler.add(answer(2, [*prompt, *range(200, 220)], 3))
    scheduler.plan()
    assert [held.number for held in scheduler.reading] == []
    assert served(scheduler)[0] == [2]


def test_the_window_of_a_prompt_is_always_read():
    scheduler = Scheduler(SIZES, RULES._replace(window=20), PACE)
    for number in range(2):
        scheduler.add(answer(number, range(48), 2))
    starts = {}
    for chunk in chunks_of(*served(scheduler)[1]):
        starts.setdefault(chunk.answer, chunk.start)
    # 28 tokens may be shared, and a chunk begins at 16
    assert sorted(starts.values()) == [0, 16]


def test_who_does_not_fit_waits_and_keeps_those_behind_from_its_memory():
    scheduler = Scheduler(SIZES._replace(num_groups=17), RULES, PACE)
    scheduler.add(answer(0, range(40), 8))
    scheduler.plan()
    scheduler.add(answer(1, range(100, 130), 2))
    scheduler.add(answer(2, range(200, 231), 2))
    order, _ = served(scheduler)
    assert order == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "tokens", "groups", "message"),
    [
        (60, 5, 33, r"is 65: must be at most max_model_len=64"),
        (30, 5, 8, r"is 35: must fit in the 28 tokens of K and V"),
    ],
)
def test_what_can_never_fit_is_refused(prompt, tokens, groups, message):
    scheduler = Scheduler(SIZES._replace(num_groups=groups), RULES, PACE)
    with pytest.raises(ValueError, match=message):
        scheduler.add(answer(0, range(prompt), tokens))
    assert scheduler.idle


@pytest.mark.parametrize("tokens", range(1, 60))
def test_chunks_of_a_prompt_are_foretold_as_they_are_planned(tokens):
    scheduler = Scheduler(SIZES, RULES, PACE)
    scheduler.add(answer(0, range(tokens), 1))
    planned = []
    while (reading := scheduler.plan().reading) is not None:
        planned.append((reading.size, reading.last))
    assert SIZES.chunks(0, tokens) == planned


def test_few_rows_decode_in_the_smallest_program_that_has_them():
    sizes = SIZES._replace(rows=(1, 2, 6))
    assert [sizes.rows_for(count) for count in range(1, 7)] == [1, 2, 6, 6, 6, 6]


def test_rows_are_computed_for_those_that_decode_in_whatever_slots_they_are():
    scheduler = Scheduler(PACKED, RULES, PACE)
    for number, tokens in enumerate((2, 2, 30)):
        scheduler.add(answer(number, range(100 * number, 100 * number + 3), tokens))
    plans = [plan.decoding for plan in served(scheduler)[1] if plan.decoding is not None]
    assert [(plan.num_rows, len(plan.rows)) for plan in plans][:3] == [(6, 3), (2, 1), (2, 1)]
    assert plans[-1].rows[0].slot == 2
    # while the program of few rows is not there
    scheduler = Scheduler(PACKED, RULES, PACE, rows_for=lambda count: 6)
    scheduler.add(answer(0, range(3), 3))
    last = [plan.decoding for plan in served(scheduler)[1] if plan.decoding is not None]
    assert {plan.num_rows for plan in last} == {6}


def test_short_prompts_are_read_together_where_they_fill_half_of_a_program():
    def read(*lengths):
        scheduler = Scheduler(PACKED, RULES, PACE)
        for number, length in enumerate(lengths):
            scheduler.add(answer(number, range(100 * number, 100 * number + length), 1))
        plans = [plan.reading for plan in served(scheduler)[1] if plan.reading is not None]
        return [(plan.num_rows, plan.size, [c.answer for c in plan.chunks]) for plan in plans]

    assert read(4, 4, 4, 4) == [(3, 4, [0, 1, 2]), (1, 4, [3])]
    # 16 of 48 would be too few, 16 of 32 are not; another size is no company
    assert read(8, 8) == [(2, 8, [0, 1])]
    assert read(3, 10) == [(1, 4, [0]), (1, 16, [1])]
    # their first chunks alike, and their second
    assert read(18, 18) == [(2, 16, [0, 1]), (2, 4, [0, 1])]


def test_what_two_prompts_have_in_common_is_read_once_also_when_they_come_together():
    scheduler = Scheduler(PACKED, RULES, PACE)
    for number in range(2):
        scheduler.add(answer(number, [*range(16), 100 + number, 1, 2], 1))
    plans = [plan.reading for plan in served(scheduler)[1] if plan.reading is not None]
    assert [len(plan.chunks) for plan in plans] == [1, 2]
    assert {chunk.start for chunk in plans[1].chunks} == {16}


def steps_between(sizes, pace=PACE):
    """The milliseconds of reading before each decode step, and the sizes of chunks."""
    scheduler = Scheduler(sizes, RULES._replace(periods=()), pace)
    scheduler.add(answer(0, range(4), 30))
    scheduler.plan()
    scheduler.add(answer(1, range(100, 155), 5))
    stalls, stall, chunks = [], 0, []
    while (plan := scheduler.plan()).reading is not None:
        reading = plan.reading
        chunks.append(reading.size)
        stall += took(reading.num_rows, reading.size, reading.chunks[0].start)
        if plan.decoding is not None:
            stalls.append(stall)
            stall = 0
    return stalls, chunks


def test_rows_wait_no_longer_for_reading_than_they_may():
    # chunks of 16 take 16 and 24 ms, those of 8 from position 32 on 16, 18 and 20, a step 1
    assert steps_between(SIZES) == ([16, 24, 16, 18, 20], [16, 16, 8, 8, 8])
    assert steps_between(SIZES._replace(max_stall_ms=40))[0] == [16, 24, 34, 20]
    assert steps_between(SIZES._replace(max_stall_ms=41)) == ([40, 34, 20], [16, 16, 8, 8, 8])
    stalls, chunks = steps_between(SIZES._replace(max_stall_ms=None))
    assert (stalls, chunks) == ([94], [16, 16, 8, 8, 8])


def test_chunks_are_as_short_as_rows_that_decode_need_them():
    # 8 from position 16 on take 12 and 14 ms, where 16 would take 24
    stalls, chunks = steps_between(VARIANT._replace(max_stall_ms=21))
    assert chunks == [16, 8, 8, 8, 8, 8]
    assert stalls == [16, 12, 14, 16, 18, 20]
    # where nothing is known, one by one
    assert steps_between(VARIANT._replace(max_stall_ms=20), Pace(lambda *_: None))[1] == [8] * 7


def test_without_a_limit_all_prompts_are_read_first():
    scheduler = Scheduler(UNHURRIED, RULES._replace(periods=()), PACE)
    for number in range(3):
        scheduler.add(answer(number, range(100 * number, 100 * number + 20), 5))
    plans = served(scheduler)[1]
    first = next(nth for nth, plan in enumerate(plans) if plan.decoding is not None)
    assert len(plans[first].decoding.rows) == 3
    assert not any(plan.reading for plan in plans[first + 1 :])


def test_a_prompt_goes_on_behind_any_block_where_chunks_may_begin_anywhere():
    def read(sizes):
        scheduler = Scheduler(sizes, RULES, PACE)
        scheduler.add(answer(0, range(30), 1))
        served(scheduler)
        scheduler.add(answer(1, [*range(29), 100, 101], 1))
        return [chunk.start for chunk in chunks_of(*served(scheduler)[1])]

    assert read(ALONE) == [16]
    assert read(VARIANT) == [24]


def test_answers_grow_into_memory_that_others_have_not_used():
    """Where each took the memory of all its tokens at once, four could not run together."""
    sizes = PACKED._replace(num_groups=21, growth_tokens=8, steps=4)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), PACE)
    for number in range(4):
        scheduler.add(answer(number, range(100 * number, 100 * number + 4), 40))
    running, sent = [], []
    for _ in range(200):
        plan = scheduler.plan()
        running.append(len(scheduler.decoding))
        if plan.decoding is not None:
            sent.append([row.answer for row in plan.decoding.rows])
        if scheduler.idle:
            break
    assert scheduler.idle
    assert max(running) == 4
    # three groups each, then five of twenty are left: one may grow to its end, the others wait
    assert [0, 1, 2, 3] in sent
    assert any(len(rows) < 4 for rows in sent[: len(sent) // 2])


def test_what_several_share_is_free_once_all_of_them_have_ended():
    sizes = PACKED._replace(num_groups=21, growth_tokens=4, steps=1)
    scheduler = Scheduler(sizes, RULES._replace(periods=(), window=0), PACE)
    prefix = list(range(32))
    # few groups of 14; 10 of 12; 2 of 4 beside 8 that it shares with the second
    for number, (prompt, tokens) in enumerate(
        ((range(100, 104), 52), ([*prefix, 200], 12), ([*prefix, 300], 12))
    ):
        scheduler.add(answer(number, prompt, tokens))
        while len(scheduler.decoding) <= number:
            assert scheduler.plan().reading is not None
    served(scheduler)
    assert scheduler.idle


def test_none_begins_whose_company_could_keep_all_from_ending():
    sizes = PACKED._replace(num_groups=13, growth_tokens=4)
    scheduler = Scheduler(sizes, RULES._replace(periods=()), PACE)
    # 12 groups: each has 5 and needs 9, so that two would wait for each other for ever
    for number in range(2):
        scheduler.add(answer(number, range(100 * number, 100 * number + 16), 20))
    scheduler.plan()
    assert len(scheduler.waiting) == 1
    assert served(scheduler)[0] == [1]
    assert scheduler.idle
