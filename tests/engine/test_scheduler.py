"""Tests the scheduler by simulated events: no memory is lost, no plan is wrong, nobody starves."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jsparse.engine.scheduler import MAX_READING, Scheduler
from jsparse.engine.sizes import EngineSizes, Rules
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
    rows=(6,),
)
RULES = Rules(root="root", window=2, replays=False, periods=(3,))


def answer(number, prompt, tokens, born=0.0):
    return Answer(number, list(prompt), tokens, born)


class Serving(RuleBasedStateMachine):
    """Adds, stops and plans at random; a model of the device follows each plan."""

    replays = False

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(SIZES, RULES._replace(replays=self.replays))
        self.asked, self.clock = [], 0.0
        # what a device would hold: per answer, the prompt's tokens in its groups, and its steps
        self.read, self.steps, self.slots = {}, Counter(), {}
        # the tokens that groups hold, and whether a whole chunk wrote them
        self.written = {}

    @rule(
        size=st.integers(1, 55),
        tokens=st.integers(1, 9),
        alphabet=st.integers(1, 2),
        seconds=st.floats(0, 0.002),
    )
    def add(self, size, tokens, alphabet, seconds):
        self.clock += seconds
        prompt = [(nth // 16) % alphabet for nth in range(size)]
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
        if plan.chunk is not None:
            self.follow_chunk(plan.chunk)
        slots = [row.slot for row in plan.rows]
        assert len(slots) == len(set(slots))
        for row in plan.rows:
            asked = self.asked[row.answer]
            assert self.slots[row.slot] == row.answer
            assert 1 <= row.steps <= plan.steps
            before = self.steps[row.answer] - 1
            self.steps[row.answer] += row.steps
            assert row.age == self.steps[row.answer] - 1
            assert self.steps[row.answer] <= asked.max_tokens
            # no program runs past a row's service
            assert all(before // every == (row.age - 1) // every for every in RULES.periods)

    def follow_chunk(self, chunk):
        asked = self.asked[chunk.answer]
        assert not asked.stopped
        assert chunk.start == SIZES.chunk_start(chunk.start)
        assert 1 <= chunk.valid <= chunk.size <= SIZES.chunk_size(chunk.start)
        tokens = len(asked.ids) + asked.max_tokens
        assert len(chunk.groups) == len(set(chunk.groups)) == SIZES.groups_for(tokens)
        if not chunk.fresh:
            assert self.read[chunk.answer] == chunk.start
        # what it did not read itself is there: another has written these very tokens
        for at in range(0, chunk.start, SIZES.page_size):
            group = chunk.groups[at // SIZES.page_size]
            tokens, whole = self.written[group]
            assert tokens == asked.ids[: at + SIZES.page_size]
            assert whole
        end = chunk.start + chunk.valid
        assert not chunk.replay or (self.replays and not chunk.last)
        if self.replays:
            assert chunk.fresh == (chunk.start == 0)
        for at in range(chunk.start, end, SIZES.page_size):
            group = chunk.groups[at // SIZES.page_size]
            if chunk.replay:
                assert self.written[group] == (asked.ids[: at + SIZES.page_size], True)
                continue
            whole = chunk.valid == SIZES.chunk_size(chunk.start)
            self.written[group] = asked.ids[: min(end, at + SIZES.page_size)], whole
        if not chunk.replay:
            for group in chunk.groups[-(-end // SIZES.page_size) :]:
                self.written.pop(group, None)
        self.read[chunk.answer] = end
        assert chunk.last == (end == len(asked.ids))
        if chunk.last:
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
        assert len(scheduler._partly) <= MAX_READING
        for held in live:
            assert len(held.groups) == SIZES.groups_for(len(held.ids) + held.max_tokens)

    def teardown(self):
        """Everything comes to an end, and all memory comes back."""
        for _ in range(60 * (len(self.asked) + 1)):
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


def run_events(machine, examples, steps):
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps)
    machine.TestCase("runTest").runTest()


@pytest.mark.parametrize("machine", [Serving, Replaying])
def test_random_events(machine):
    run_events(machine, 30, 60)


def served(scheduler, plans=1000):
    """The numbers of answers in the order in which their prompts were read, and all plans."""
    order, made = [], []
    for _ in range(plans):
        plan = scheduler.plan()
        made.append(plan)
        if plan.chunk is not None and plan.chunk.last:
            order.append(plan.chunk.answer)
        if scheduler.idle:
            break
    return order, made


def test_the_shortest_is_read_first_but_none_waits_forever():
    scheduler = Scheduler(SIZES, RULES)
    scheduler.add(answer(0, range(50), 1))
    scheduler.add(answer(1, range(100, 103), 1))
    assert served(scheduler)[0] == [1, 0]
    scheduler = Scheduler(SIZES, RULES)
    scheduler.add(answer(0, range(50), 1, born=0.0))
    # it came later by more than what the long one is longer
    scheduler.add(answer(1, range(100, 103), 1, born=0.01))
    assert served(scheduler)[0] == [0, 1]


def test_a_short_prompt_overtakes_a_long_one_that_is_being_read():
    scheduler = Scheduler(SIZES, RULES)
    scheduler.add(answer(0, range(55), 1))
    chunks = [scheduler.plan().chunk]
    scheduler.add(answer(1, range(100, 103), 1))
    chunks += [scheduler.plan().chunk for _ in range(2)]
    assert [chunk and (chunk.answer, chunk.start) for chunk in chunks] == [(0, 0), (1, 0), (0, 16)]


def test_programs_are_long_only_where_nobody_waits_for_their_end():
    scheduler = Scheduler(SIZES, RULES._replace(periods=()))
    scheduler.add(answer(0, range(4), 30))
    scheduler.add(answer(1, range(100, 134), 30))
    plans = served(scheduler)[1]
    reading = [plan.steps for plan in plans if plan.chunk is not None and not plan.chunk.last]
    assert set(reading) == {1}
    after = [plan.steps for plan in plans if plan.rows][-8:]
    # the last of the longest row's 29 steps run one by one
    assert after == [8, 8, 8, 1, 1, 1, 1, 1]


def test_rows_meet_their_service():
    scheduler = Scheduler(SIZES, RULES._replace(periods=(10,)))
    scheduler.add(answer(0, range(4), 40))
    ages = [row.age for plan in served(scheduler)[1] for row in plan.rows]
    assert {10, 20, 30} <= set(ages)
    assert ages[:4] == [8, 9, 10, 18]


def test_what_others_have_read_is_not_read_again():
    scheduler = Scheduler(SIZES, RULES)
    prompt = list(range(40))
    for number in range(3):
        scheduler.add(answer(number, [*prompt, 100 + number], 2))
    chunks = [plan.chunk for plan in served(scheduler)[1] if plan.chunk is not None]
    read = Counter()
    for chunk in chunks:
        read[chunk.answer] += chunk.valid
    # 39 may be taken over, so that two are left for the window, and a chunk begins at 32
    assert sorted(read.values()) == [9, 9, 41]


def test_who_is_overtaken_goes_on_behind_what_others_have_read_since():
    """With a state that has seen nothing: it has not seen what lies between."""
    scheduler = Scheduler(SIZES, RULES)
    prompt = list(range(55))
    scheduler.add(answer(0, prompt, 1))
    scheduler.plan()
    scheduler.add(answer(1, [*prompt[:40], 100, 101], 1))
    chunks = [plan.chunk for plan in served(scheduler)[1] if plan.chunk is not None]
    assert [(chunk.answer, chunk.start, chunk.fresh) for chunk in chunks] == [
        (1, 16, True),
        (1, 32, False),
        (1, 40, False),
        (0, 40, True),
        (0, 48, False),
    ]


def test_no_more_than_a_few_prompts_are_partly_read():
    scheduler = Scheduler(SIZES._replace(num_groups=97), RULES)
    for number in range(MAX_READING + 1):
        # each has waited for longer than those before
        ids = range(100 * number, 100 * number + 50)
        scheduler.add(answer(number, ids, 1, born=-0.01 * number))
        chunk = scheduler.plan().chunk
        assert chunk is not None
        assert chunk.answer == min(number, MAX_READING - 1)


def test_blocks_that_a_request_takes_over_are_not_counted_as_room_for_the_rest():
    scheduler = Scheduler(SIZES._replace(num_groups=13), RULES)
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
    scheduler = Scheduler(SIZES, RULES._replace(window=20))
    for number in range(2):
        scheduler.add(answer(number, range(48), 2))
    starts = {}
    for plan in served(scheduler)[1]:
        if plan.chunk is not None:
            starts.setdefault(plan.chunk.answer, plan.chunk.start)
    # 28 tokens may be shared, and a chunk begins at 16
    assert sorted(starts.values()) == [0, 16]


def test_who_does_not_fit_waits_and_keeps_those_behind_from_its_memory():
    scheduler = Scheduler(SIZES._replace(num_groups=17), RULES)
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
    scheduler = Scheduler(SIZES._replace(num_groups=groups), RULES)
    with pytest.raises(ValueError, match=message):
        scheduler.add(answer(0, range(prompt), tokens))
    assert scheduler.idle


@pytest.mark.parametrize("tokens", range(1, 60))
def test_chunks_of_a_prompt_are_foretold_as_they_are_planned(tokens):
    scheduler = Scheduler(SIZES, RULES)
    scheduler.add(answer(0, range(tokens), 1))
    planned = []
    while (chunk := scheduler.plan().chunk) is not None:
        planned.append((chunk.size, chunk.last))
    assert SIZES.chunks(0, tokens) == planned


def test_few_rows_decode_in_the_smallest_program_that_has_them():
    sizes = SIZES._replace(rows=(1, 2, 6))
    assert [sizes.rows_for(slot) for slot in range(6)] == [1, 2, 6, 6, 6, 6]
