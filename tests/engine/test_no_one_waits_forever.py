"""Tests that every sequence finishes, for many sizes of device and host memory."""

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
        host_groups=random.randint(0, 128),
        moved_groups=random.choice([1, 4]),
        evicted_pages=pages,
        drafts=(3, 3) if kind == "exact" else (),
    )
    root = random.choice(["root", None])
    return Scheduler(sizes, RULES._replace(root=root, periods=(), slots=slots), LATENCY)


def served(scheduler, random, kind):
    """Serves some sequences; returns the number of swaps."""
    seqs, swapped, late, nothing = {}, 0, [], 0
    for number in range(random.randint(2, 8)):
        prompt = random.randint(1, 50)
        made = seq(number, [number // 2] * prompt, random.randint(1, 64 - prompt))
        seqs[number] = SimpleNamespace(seq=made, tokens=0)
        scheduler.add(made)
    while not scheduler.idle:
        plan, given = scheduler.plan(), []
        swapped += len(plan.swapped_out)
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
    assert scheduler.memory.swapped == 0
    assert scheduler.pool.available == scheduler.pool.size
    return swapped


@pytest.mark.parametrize("kind", ["steps", "exact", *SLOTS])
def test_every_sequence_finishes(kind):
    swapped = 0
    for seed in range(250):
        random = Random(seed)
        swapped += served(make_scheduler(random, kind), random, kind)
    assert swapped > 0
