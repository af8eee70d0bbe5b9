"""Builds schedulers with small sizes, and sequences for them; follows their plans."""

import numpy as np

from jsparse.engine.sizes import EngineSizes, Rules
from jsparse.engine.step_plan import SequenceState

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
# the sizes of an engine without batch invariance, with no clients that wait for tokens
VARIANT = SIZES._replace(batch_invariant=False)
UNHURRIED = VARIANT._replace(max_stall_ms=None)
PACKED = SIZES._replace(max_stall_ms=60)
ALONE = SIZES._replace(prefill_rows=(1,))
RULES = Rules(root="root", window=2, replays=False, periods=(3,))


def took(rows, size, start):
    """The prefill times of programs, in milliseconds."""
    return rows * size * (1 + start / 32)


class LatencyModel:
    """A latency model with given times of programs, or only of steps."""

    def __init__(self, prefill=took, step=1):
        self.prefill, self.drafts, self.idles = prefill, lambda *_, **__: 3, False
        self.step = lambda rows: step


LATENCY = LatencyModel()


def seq(number, prompt, tokens, arrival=0.0, **options):
    return SequenceState(number, np.array(prompt, np.int32), tokens, arrival, **options)


def served(scheduler, plans=1000):
    """The numbers of sequences in the order of their prefill, and all plans."""
    order, made = [], []
    for _ in range(plans):
        plan = scheduler.plan()
        made.append(plan)
        if plan.prefill is not None and plan.prefill.last:
            order += [chunk.seq for chunk in plan.prefill.chunks]
        if scheduler.idle:
            break
    return order, made


def chunks_of(*plans):
    """The chunks of plans."""
    return [chunk for plan in plans if plan.prefill is not None for chunk in plan.prefill.chunks]
