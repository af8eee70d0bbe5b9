"""Tests that every sequence finishes with its own K and V, for many sizes of memory."""

from random import Random
from types import SimpleNamespace

import pytest

from jsparse.engine.scheduler import Scheduler
from tests.support.planning import LATENCY, RULES, VARIANT, seq

pytestmark = pytest.mark.pure

# maximum slots per head by prompt and new tokens, and the pages that rows can have then
SLOTS = {
    "compressed": (lambda prompt, new: min(prompt + new, 24), 6),
    "compressed prompts": (lambda prompt, new: min(prompt, 10) + new, 16),
}
LAG = 2


def make_scheduler(random, kind):
    """A scheduler with memory for one to three sequences on the device and none to eight on the
    host.
    """
    slots, pages = SLOTS.get(kind, (lambda prompt, new: prompt + new, 0))
    sizes = VARIANT._replace(
        max_stall_ms=random.choice([20, None]),
        growth_tokens=random.choice([4, 8, 16]),
        num_groups=random.randint(18, 49) + pages,
        host_blocks=random.randint(0, 64),
        evicted_pages=pages,
        drafts=(3, 3) if kind == "exact" else (),
    )
    root = random.choice(["root", None])
    return Scheduler(sizes, RULES._replace(root=root, periods=(), slots=slots), LATENCY)


class Device:
    """The pages in groups and in host memory, each named by a prompt's token or by its row."""

    def __init__(self, seqs, sizes):
        self.seqs, self.page, self.compresses = seqs, sizes.page_size, sizes.evicted_pages > 0
        self.pages, self.on_host = {}, {}

    def follow(self, plan):
        self.copy(plan.copies)
        if (prefill := plan.prefill) is not None:
            for chunk in prefill.chunks:
                self.prefill(chunk, last=prefill.last)
        self.copy(plan.late_copies)
        for row in plan.decode.rows if plan.decode is not None else ():
            groups = self.seqs[row.seq].seq.groups
            self.write(row.seq, groups, row.first if row.groups else len(groups))
            first = self.first(row.seq)
            token = int(self.seqs[row.seq].seq.ids[0])
            expected = [("prompt", token, nth) for nth in range(first)]
            expected += [("row", row.seq, nth) for nth in range(first, len(groups))]
            assert [self.pages[group] for group in groups] == expected

    def copy(self, copies):
        for copy in copies:
            if copy.out:
                self.on_host[copy.place] = [self.pages.pop(group) for group in copy.groups]
            else:
                self.pages |= zip(copy.groups, self.on_host[copy.place], strict=True)

    def prefill(self, chunk, last):
        token = int(self.seqs[chunk.seq].seq.ids[0])
        for nth, group in enumerate(chunk.groups[: -(-(chunk.start + chunk.valid) // self.page)]):
            page = "prompt", token, nth
            assert nth >= chunk.start // self.page or self.pages[group] == page
            self.pages[group] = page
        if last:
            self.write(chunk.seq, chunk.kept or chunk.groups, self.first(chunk.seq))

    def first(self, number):
        """The first page of a row that no prompt can share."""
        return 0 if self.compresses else len(self.seqs[number].seq.ids) // self.page

    def write(self, number, groups, first):
        self.pages |= {
            group: ("row", number, first + nth) for nth, group in enumerate(groups[first:])
        }


def served(scheduler, random, kind):
    """Serves some sequences; returns the numbers of preemptions, and of blocks that came back."""
    seqs, preempted, late, nothing, back = {}, 0, [], 0, 0
    for number in range(random.randint(2, 8)):
        prompt = random.randint(1, 50)
        made = seq(number, [number // 2] * prompt, random.randint(1, 64 - prompt))
        seqs[number] = SimpleNamespace(seq=made, tokens=0)
        scheduler.add(made)
    device = Device(seqs, scheduler.sizes)
    while not scheduler.idle:
        plan, given = scheduler.plan(), []
        device.follow(plan)
        preempted += len(plan.preempted)
        back += sum(not copy.out for copy in [*plan.copies, *plan.late_copies])
        if plan.prefill is not None and plan.prefill.last:
            given += [(chunk.seq, 1, 1) for chunk in plan.prefill.chunks]
        if plan.decode is not None and plan.decode.drafts is not None:
            given += [
                (row.seq, row.steps, random.randint(1, row.steps)) for row in plan.decode.rows
            ]
        late.append(given)
        while late and (len(late) > LAG or plan.empty):
            for number, planned, tokens in late.pop(0):
                own = seqs[number]
                if kind == "exact" and not own.seq.stopped:
                    own.tokens += tokens
                    scheduler.record_tokens(own.seq, planned, tokens)
                    if own.tokens >= own.seq.max_tokens:
                        scheduler.stop(own.seq)
        nothing = nothing + 1 if plan.empty else 0
        assert nothing < 10
    pool = scheduler.pool
    pool.clear()
    assert pool.pinned == pool.used_places == 0
    assert len(pool._free) == pool.size
    return preempted, back


@pytest.mark.parametrize("kind", ["steps", "exact", *SLOTS])
def test_every_sequence_finishes(kind):
    counts = []
    for seed in range(250):
        random = Random(seed)
        counts.append(served(make_scheduler(random, kind), random, kind))
    assert all(sum(column) > 0 for column in zip(*counts, strict=True))
