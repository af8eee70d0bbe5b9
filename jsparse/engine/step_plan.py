"""Defines StepPlan, the device's next programs, and SequenceState, the scheduler's sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from jsparse.engine.blocks import CacheBlock, Copy
from jsparse.runtime.draft_length import Acceptance

# Each second of waiting makes a prompt count as this many tokens shorter, about what an 8B model
# prefills in that time. So the shortest prompt goes first, and none waits forever.
TOKENS_PER_SECOND = 20_000

Phase = Enum("Phase", ["WAITING", "PREFILL", "DECODING", "PREEMPTED", "ENDED"])


@dataclass(eq=False)
class SequenceState:
    """One sequence, a prompt and one completion of it, as the scheduler sees it.

    Attributes:
        number: its number in plans.
        ids: the prompt, int32 [T].
        max_tokens: the most tokens of the completion.
        arrival: the arrival time, in seconds.
        keys: the keys of the prompt's blocks.
        phase, slot: its phase and slot.
        place: the place of its newest queries during prefill, else -1.
        fresh: whether the next chunk starts with an empty policy state.
        prefilled: the number of prompt tokens that the state has seen, as planned.
        kv_tokens: the number of prompt tokens with K and V; greater than `prefilled` while tokens
            from the prefix cache are replayed.
        cached_tokens: the number of tokens from the prefix cache.
        host_tokens: the number of these that were in host memory when it was admitted.
        planned: the number of planned tokens; for a pending verification round, the most that it
            can yield.
        stopped: whether no more tokens are needed.
        cache_salt: a secret; sequences share blocks only if theirs are equal.
        generated: its tokens, if it has stopped and others may share them.
        blocks: its blocks, the prefix of the prompt; while it is preempted, all its memory.
        private_groups: the groups after them.
        kept_groups: the groups for the compressed prompt, if the policy evicts.
        joined: its position in the order in which sequences started to decode.
        priority: sequences with a smaller one start first.
        scored: whether all tokens of the prompt are computed, even cached ones.
        stepwise: whether its next token may be planned only when all before it are known.
        known: the number of tokens whose results have arrived.
        acceptance: that of its drafts.
    """

    number: int
    ids: np.ndarray
    max_tokens: int
    arrival: float
    keys: list[bytes] = field(default_factory=list)
    cache_salt: str = ""
    phase: Phase = Phase.WAITING
    slot: int = -1
    place: int = -1
    fresh: bool = True
    prefilled: int = 0
    kv_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    planned: int = 0
    stopped: bool = False
    generated: Sequence[int] = ()
    blocks: list[CacheBlock] = field(default_factory=list)
    private_groups: list[int] = field(default_factory=list)
    kept_groups: list[int] = field(default_factory=list)
    joined: int = 0
    priority: int = 0
    scored: bool = False
    stepwise: bool = False
    known: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def groups(self) -> list[int]:
        """Its groups, in the order of its tokens."""
        return [*(group for block in self.blocks for group in block.groups), *self.private_groups]

    @property
    def rank(self) -> tuple[int, float]:
        """The rank in the order of prefill, the smallest first.

        All waiting sequences age alike, so the current time does not matter.
        """
        left = len(self.ids) - self.prefilled
        return self.priority, left + self.arrival * TOKENS_PER_SECOND


class Chunk(NamedTuple):
    """One chunk of a prompt.

    Attributes:
        seq: the number of the sequence.
        slot: the slot that it will decode in.
        place: the place of the prompt's newest queries.
        fresh: whether the prompt starts here, with an empty policy state.
        start, valid: the position of the first token, and the number of tokens.
        groups: the sequence's groups.
        kept: the groups of the compressed prompt, if it ends here and the policy evicts; afterwards
            the sequence has only these.
    """

    seq: int
    slot: int
    place: int
    fresh: bool
    start: int
    valid: int
    groups: list[int]
    kept: Sequence[int] = ()


class PrefillPlan(NamedTuple):
    """A prefill program: one chunk of each of some prompts.

    Attributes:
        num_rows: the number of prompts that the program is compiled for.
        size: the number of tokens that each chunk is padded to.
        last: whether these prompts end here: first tokens are chosen, and the sequences decode.
        replay: whether K and V are cached, and only the policy's state is built from them.
        chunks: the chunks.
    """

    num_rows: int
    size: int
    last: bool
    replay: bool
    chunks: list[Chunk]


class RowPlan(NamedTuple):
    """The steps of one row in a decode program.

    Attributes:
        seq, slot: the number of the sequence, and its slot.
        steps: the number of its steps; in a verification round, the most tokens that it may yield.
        age: the number of steps that it will have decoded afterwards.
        groups: the groups allocated for these steps.
        first: the number of groups that it had before.
    """

    seq: int
    slot: int
    steps: int
    age: int
    groups: list[int]
    first: int


class SharedPrefix(NamedTuple):
    """Rows that share the pages of their first tokens.

    Attributes:
        tokens: the number of shared tokens.
        slots: the slots of the rows.
    """

    tokens: int
    slots: list[int]


class DecodePlan(NamedTuple):
    """A program of `steps` decode steps, or a verification round, which counts as one.

    Attributes:
        num_rows: the number of rows that the program is compiled for.
        steps: the number of steps.
        rows: the rows that take part.
        prefixes: the prefixes that rows read together; (): each row reads its own.
        drafts: the most drafts of a verification round; None: decode steps.
    """

    num_rows: int
    steps: int
    rows: list[RowPlan]
    prefixes: Sequence[SharedPrefix] = ()
    drafts: int | None = None


class Resumed(NamedTuple):
    """A preempted sequence that decodes again.

    Attributes:
        seq, slot: the number of the sequence, and its slot, which it has kept.
        groups: its groups, in the order of its tokens.
    """

    seq: int
    slot: int
    groups: list[int]


class StepPlan(NamedTuple):
    """The device's next programs.

    Attributes:
        prefill: the prefill program; None: none.
        decode: the decode program, which runs last; None: none.
        copies: copies of blocks, in this order, before everything else.
        resumed: the sequences that decode again, after these copies.
        late_copies: further copies, between prefill and decoding.
        preempted: the numbers of sequences that have lost their groups before these copies.
    """

    prefill: PrefillPlan | None
    decode: DecodePlan | None
    copies: Sequence[Copy] = ()
    resumed: Sequence[Resumed] = ()
    late_copies: Sequence[Copy] = ()
    preempted: Sequence[int] = ()

    @property
    def empty(self) -> bool:
        """Whether the plan has no work."""
        return not any(self)
