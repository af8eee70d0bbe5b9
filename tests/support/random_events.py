"""Adds, stops and plans at random, and checks each plan as a device would execute it."""

import operator
from collections import Counter
from random import Random
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jsparse.engine import shared_prefixes
from jsparse.engine.scheduler import Scheduler
from jsparse.engine.sizes import MAX_PREFILLS
from jsparse.engine.step_plan import Phase
from tests.support.planning import LATENCY, PACKED, RULES, SIZES, VARIANT, seq


class Serving(RuleBasedStateMachine):
    """Adds, stops and plans at random; a model of the device executes each plan."""

    replays, sizes, most = False, PACKED, staticmethod(operator.add)

    def __init__(self):
        super().__init__()
        rules = RULES._replace(replays=self.replays, slots=self.most)
        self.scheduler = Scheduler(self.sizes, rules, LATENCY)
        self.asked, self.cut_short, self.clock = [], set(), 0.0
        # the device's contents: per sequence, the prompt's tokens in its groups, and its steps
        self.read, self.steps, self.slots, self.places = {}, Counter(), {}, {}
        self.tables = {}
        # the tokens in groups, and whether a whole chunk wrote them, or the row and the page; the
        # same by place in host memory
        self.written, self.on_host = {}, {}

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
        made = seq(len(self.asked), prompt, tokens, self.clock)
        self.scheduler.add(made)
        self.asked.append(made)

    @rule(nth=st.integers(0, 400))
    def stop(self, nth):
        if self.asked:
            asked = self.asked[nth % len(self.asked)]
            if asked.phase is not Phase.ENDED and not asked.stopped:
                self.cut_short.add(asked.number)
            self.scheduler.stop(asked)

    @rule(times=st.integers(1, 6))
    def plan(self, times):
        for _ in range(times):
            self.follow(self.scheduler.plan())

    def follow(self, plan):
        self.follow_copies(plan.copies)
        for row in plan.resumed:
            assert self.slots[row.slot] == row.seq
            assert row.seq not in self.tables
            self.tables[row.seq] = list(row.groups)
        if plan.prefill is not None:
            self.follow_prefill(plan.prefill)
        for number in plan.preempted:
            del self.tables[number]
        self.follow_copies(plan.late_copies)
        if plan.decode is None:
            return
        self.follow_prefixes(plan.decode)
        self.follow_decode(plan.decode)

    def follow_copies(self, copies):
        for copy in copies:
            assert 0 <= copy.place < self.sizes.host_blocks
            assert 1 <= len(copy.groups) == len(set(copy.groups)) <= self.sizes.block_groups
            if copy.out:
                self.on_host[copy.place] = [self.written.pop(group) for group in copy.groups]
            else:
                self.written |= zip(copy.groups, self.on_host[copy.place], strict=True)

    def follow_decode(self, decoding):
        assert decoding.drafts is None
        slots = [row.slot for row in decoding.rows]
        assert 1 <= len(slots) == len(set(slots)) <= decoding.num_rows
        assert decoding.num_rows in self.sizes.rows
        for row in decoding.rows:
            asked = self.asked[row.seq]
            assert self.slots[row.slot] == row.seq
            assert 1 <= row.steps <= decoding.steps
            before = self.steps[row.seq] - 1
            self.steps[row.seq] += row.steps
            assert row.age == self.steps[row.seq] - 1
            assert self.steps[row.seq] <= asked.max_tokens
            self.follow_groups(row, asked, row.age)
            # no program runs past a row's service
            assert all(before // every == (row.age - 1) // every for every in RULES.periods)

    def follow_groups(self, row, asked, tokens):
        """A row has groups for its prompt and `tokens` tokens, and the device has their numbers."""
        table = self.tables[row.seq]
        if row.groups:
            assert len(row.groups) <= self.sizes.growth
            assert row.first == len(table)
            table += row.groups
            self.write_row(row.seq, row.first)
        assert table == asked.groups
        of_prompt = 0 if self.sizes.evicted_pages else len(asked.ids) // SIZES.page_size
        for nth, group in enumerate(table):
            if nth < of_prompt:
                assert self.written[group][0] == asked.ids[: (nth + 1) * SIZES.page_size].tolist()
            else:
                assert self.written[group] == (row.seq, nth)
        assert self.most(len(asked.ids), tokens) <= len(table) * SIZES.page_size

    def write_row(self, number, first):
        """A row writes to its pages from `first` on."""
        for nth, group in enumerate(self.tables[number][first:], first):
            self.written[group] = number, nth

    def follow_prefixes(self, decoding):
        """Rows of a shared prefix have the same tokens there, and the prefix is cached."""
        count, most = self.sizes.prefixes(decoding.num_rows)
        assert len(decoding.prefixes) <= count
        together = [slot for prefix in decoding.prefixes for slot in prefix.slots]
        assert len(together) == len(set(together))
        assert {*together} <= {row.slot for row in decoding.rows}
        for prefix in decoding.prefixes:
            assert 2 <= len(prefix.slots) <= most
            assert prefix.tokens % self.sizes.page_size == 0
            groups = prefix.tokens // self.sizes.page_size
            tables = [self.tables[self.slots[slot]][:groups] for slot in prefix.slots]
            assert len(tables[0]) == groups > 0
            assert all(table == tables[0] for table in tables)
            for slot in prefix.slots:
                assert len(self.asked[self.slots[slot]].ids) >= prefix.tokens

    def follow_prefill(self, prefill):
        assert 1 <= len(prefill.chunks) <= prefill.num_rows
        assert prefill.num_rows in self.sizes.prefill_rows
        if prefill.num_rows > 1:
            assert 2 * sum(c.valid for c in prefill.chunks) >= prefill.num_rows * prefill.size
        for column in ("seq", "slot", "place"):
            assert len({getattr(chunk, column) for chunk in prefill.chunks}) == len(prefill.chunks)
        for chunk in prefill.chunks:
            # no other sequence uses a slot while its prompt is partly prefilled
            assert 0 <= chunk.place < MAX_PREFILLS
            assert chunk.fresh or self.places[chunk.seq] == chunk.place
            self.places[chunk.seq] = chunk.place
            self.follow_chunk(chunk, prefill)

    def follow_chunk(self, chunk, prefill):
        asked = self.asked[chunk.seq]
        assert not asked.stopped
        if self.sizes.batch_invariant:
            assert chunk.start == SIZES.chunk_start(chunk.start)
        assert chunk.start % SIZES.page_size == 0
        assert 1 <= chunk.valid <= prefill.size <= SIZES.chunk_size(chunk.start)
        tokens = len(asked.ids)
        if not self.sizes.evicted_pages:
            tokens += min(asked.max_tokens, self.sizes.growth_tokens)
        assert len(chunk.groups) == len(set(chunk.groups)) == SIZES.groups_for(tokens)
        if not chunk.fresh:
            assert self.read[chunk.seq] == chunk.start
        # tokens that it did not prefill are cached: another sequence wrote these very tokens
        for at in range(0, chunk.start, SIZES.page_size):
            group = chunk.groups[at // SIZES.page_size]
            tokens, whole = self.written[group]
            assert tokens == asked.ids[: at + SIZES.page_size].tolist()
            assert whole
        end = chunk.start + chunk.valid
        assert not prefill.replay or (self.replays and not prefill.last)
        if self.replays:
            assert chunk.fresh == (chunk.start == 0)
        for at in range(chunk.start, end, SIZES.page_size):
            group = chunk.groups[at // SIZES.page_size]
            if prefill.replay:
                assert self.written[group] == (asked.ids[: at + SIZES.page_size].tolist(), True)
                continue
            size = SIZES.chunk_size(chunk.start)
            whole = not self.sizes.batch_invariant or chunk.valid == size
            self.written[group] = asked.ids[: min(end, at + SIZES.page_size)].tolist(), whole
        if not prefill.replay:
            for group in chunk.groups[-(-end // SIZES.page_size) :]:
                self.written.pop(group, None)
        self.read[chunk.seq] = end
        assert prefill.last == (end == len(asked.ids))
        self.tables[chunk.seq] = list(chunk.groups)
        if prefill.last and self.sizes.evicted_pages:
            self.follow_eviction(chunk, asked)
        elif prefill.last:
            self.write_row(chunk.seq, end // SIZES.page_size)
        if prefill.last:
            self.slots[chunk.slot] = chunk.seq
            self.steps[chunk.seq] = 1

    def follow_eviction(self, chunk, asked):
        """The row continues in exclusive groups, and its own groups are unchanged."""
        first = min(asked.max_tokens, self.sizes.growth_tokens)
        slots = self.most(len(asked.ids), first)
        assert len(chunk.kept) == len(set(chunk.kept)) == SIZES.groups_for(slots)
        assert not set(chunk.kept) & set(chunk.groups)
        self.tables[chunk.seq] = list(chunk.kept)
        self.write_row(chunk.seq, 0)

    @invariant()
    def memory_is_accounted_for(self):
        scheduler, pool = self.scheduler, self.scheduler.pool
        live = [*scheduler.prefilling, *scheduler.decoding]
        blocks = Counter(block for held in live for block in held.blocks)
        own = [group for held in live for group in [*held.private_groups, *held.kept_groups]]
        shared = [group for block in blocks for group in block.groups]
        assert len(own) == len(set(own))
        assert not set(own) & set(shared)
        assert len(own) + len(set(shared)) + pool.available == pool.size
        assert all(block.references == count for block, count in blocks.items())
        slots = [held.slot for held in scheduler.begun]
        assert len(slots) == len(set(slots))
        self.host_memory_is_accounted_for(blocks)
        places = [held.place for held in scheduler.prefilling if held.place >= 0]
        assert sorted([*places, *scheduler.prompts._places]) == list(range(MAX_PREFILLS))
        for held in live:
            if held.phase is Phase.PREFILL and self.sizes.evicted_pages:
                assert len(held.groups) == SIZES.groups_for(len(held.ids))
                continue
            slots, groups = self.most(len(held.ids), max(0, held.planned - 1)), len(held.groups)
            assert SIZES.groups_for(slots) <= groups
            assert groups <= SIZES.groups_for(self.most(len(held.ids), held.max_tokens))

    def host_memory_is_accounted_for(self, in_use):
        """Every block has its contents where it is, in host memory also in a place of its own."""
        preempted, pool = self.scheduler.preempted, self.scheduler.pool
        assert not any(held.private_groups or held.kept_groups for held in preempted)
        pinned = Counter(block for held in preempted for block in held.blocks)
        assert all(block.pins == count for block, count in pinned.items())
        assert pool.pinned == len(pinned) <= self.sizes.host_blocks
        known = {*in_use, *pinned, *pool._blocks.values()}
        places = [block.place for block in known if block.place is not None]
        assert len(places) == len(set(places)) == pool.used_places <= self.sizes.host_blocks
        for block in known:
            assert block.groups or block.place is not None
            assert len(block.groups) in (0, block.size)
            if block.groups and block.place is not None:
                assert [self.written[g] for g in block.groups] == self.on_host[block.place]

    def teardown(self):
        """Everything finishes, and all memory is freed."""
        for _ in range(100 * (len(self.asked) + 1)):
            if self.scheduler.idle:
                break
            self.follow(self.scheduler.plan())
        assert self.scheduler.idle
        pool = self.scheduler.pool
        pool.clear()
        assert len(pool._free) == pool.available == pool.size
        assert pool.used_places == pool.pinned == 0
        for asked in self.asked:
            assert asked.phase is Phase.ENDED
            if asked.number not in self.cut_short:
                assert self.steps[asked.number] == asked.max_tokens


class Replaying(Serving):
    """The same, with states rebuilt from shared blocks."""

    replays = True


class Variant(Serving):
    """The same, with chunks that start anywhere and fit the stall budget of decoding rows."""

    sizes = VARIANT._replace(max_stall_ms=20, growth_tokens=8, num_groups=30, prefix_rows=3)


class VariantReplaying(Variant):
    """Both."""

    replays = True


class Scarce(Serving):
    """The same, with memory allocated page by page, and only enough for one request."""

    sizes = PACKED._replace(growth_tokens=4, num_groups=17)


class Evicting(Serving):
    """The same, with heads that keep a few tokens in separate groups."""

    sizes = PACKED._replace(evicted_pages=6, growth_tokens=4, num_groups=26)
    most = staticmethod(lambda prompt, new: min(prompt + new, 24))


class Keeping(Variant):
    """The same, with heads that keep few tokens of the prompt, and all others."""

    sizes = Variant.sizes._replace(evicted_pages=16, prefix_rows=0, num_groups=25)
    most = staticmethod(lambda prompt, new: min(prompt, 10) + new)


class Offloading(Variant):
    """The same, with cached prefixes and preempted sequences in host memory."""

    sizes = Variant.sizes._replace(host_blocks=45, growth_tokens=4, num_groups=25, prefix_rows=0)


class OffloadingLittle(Offloading):
    """The same, with too little host memory to preempt sequences."""

    sizes = Offloading.sizes._replace(host_blocks=5)


class OffloadingCompressed(Keeping):
    """Compressed rows, with host memory."""

    sizes = Keeping.sizes._replace(host_blocks=45, growth_tokens=4)


class Drafting(Variant):
    """The same, with rows that decode in rounds.

    A round gives from one token to all planned ones. The device knows the number at once, the host
    later.
    """

    sizes = Variant.sizes._replace(drafts=(3,) * len(Variant.sizes.rows), prefix_rows=0)

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(self.sizes, RULES, LATENCY)
        self.on_their_way, self.random = [], Random(0)

    def follow_prefill(self, prefill):
        super().follow_prefill(prefill)
        if prefill.last:
            # the first tokens
            read = [self.asked[chunk.seq] for chunk in prefill.chunks]
            self.on_their_way.append([(asked, 1, 1, 1) for asked in read])

    def follow_decode(self, decoding):
        assert (decoding.steps, decoding.drafts) == (1, 3)
        given = []
        for row in decoding.rows:
            asked = self.asked[row.seq]
            assert self.slots[row.slot] == row.seq
            assert 1 <= row.steps <= 1 + max(self.sizes.drafts)
            # for any results of earlier rounds, the room is sufficient and not excessive
            assert self.steps[row.seq] + row.steps <= asked.max_tokens
            self.follow_groups(row, asked, self.steps[row.seq] + row.steps - 1)
            tokens = self.random.randint(1, row.steps)
            self.steps[row.seq] += tokens
            given.append((asked, row.steps, tokens, self.steps[row.seq]))
        self.on_their_way.append(given)

    def follow(self, plan):
        super().follow(plan)
        if plan.decode is None or len(self.on_their_way) > 2:
            self.arrive()

    @rule()
    def arrive(self):
        for asked, planned, tokens, made in self.on_their_way.pop(0) if self.on_their_way else ():
            if not asked.stopped:
                self.scheduler.record_tokens(asked, planned, tokens)
                if made == asked.max_tokens:
                    self.end(asked)

    def end(self, asked):
        """Stops a sequence, whose tokens are all 0; prompts that start with it may share them."""
        self.scheduler.stop(asked, [0] * asked.max_tokens)
        if asked.phase is Phase.PREEMPTED:  # it shares nothing
            return
        text = [*asked.ids.tolist(), *[0] * (asked.max_tokens - 1)]
        for at in range(0, len(text) - SIZES.page_size + 1, SIZES.page_size):
            group = self.tables[asked.number][at // SIZES.page_size]
            self.written[group] = text[: at + SIZES.page_size], True


class DraftingOffloading(Drafting):
    """The same, with cached prefixes and preempted sequences in host memory."""

    sizes = Drafting.sizes._replace(host_blocks=45, growth_tokens=4, num_groups=25)


MACHINES = [
    Scarce,
    Serving,
    Replaying,
    Variant,
    VariantReplaying,
    Drafting,
    Evicting,
    Keeping,
    Offloading,
    OffloadingLittle,
    OffloadingCompressed,
    DraftingOffloading,
]


def run_events(machine, examples, steps):
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps)
    with patch.multiple(shared_prefixes, MIN_TOKENS=0, MIN_SHARE=0):
        machine.TestCase("runTest").runTest()
