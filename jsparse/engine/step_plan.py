"""Defines StepPlan, the device's next programs, and SequenceState, the scheduler's view of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from jsparse.engine.blocks import CacheBlock

# A prompt that has waited a second counts as this many tokens shorter, about the prefill of an 8B
# model in a second, so that the shortest goes first and none waits forever.
TOKENS_PER_SECOND = 20_000

Phase = Enum("Phase", ["WAITING", "PREFILL", "DECODING", "SWAPPED", "ENDED"])


@dataclass(eq=False)
class SequenceState:
    """Holds one sequence, a prompt and one completion of it, as the scheduler sees it.

    Attributes:
        number: its name in plans.
        ids: the prompt, int32 [T].
        max_tokens: the most tokens of the completion.
        arrival: the arrival time, in seconds.
        keys: the keys of the prompt's blocks.
        phase, slot: its phase and slot.
        place: the place of its newest queries during prefill, else -1.
        fresh: whether the policy's state begins anew with the next chunk.
        prefilled: the number of prompt tokens that the state has seen, as planned.
        kv_tokens: the number of prompt tokens with K and V; greater than `prefilled` while tokens
            from the prefix cache are replayed.
        cached_tokens: the number of tokens from the prefix cache.
        planned: the number of planned tokens; of a pending verification round, the most that it can
            yield.
        stopped: whether no more tokens are wanted.
        cache_salt: the secret that sequences must have in common to share blocks.
        generated: its tokens, if it has stopped and others may share them.
        blocks: its blocks, the prefix of the prompt.
        private_groups: the groups after them.
        kept_groups: the groups for the compressed prompt, if the policy evicts.
        joined: its place in the order in which sequences began to decode.
        swapped: the number of its groups in host memory.
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
    planned: int = 0
    stopped: bool = False
    generated: Sequence[int] = ()
    blocks: list[CacheBlock] = field(default_factory=list)
    private_groups: list[int] = field(default_factory=list)
    kept_groups: list[int] = field(default_factory=list)
    joined: int = 0
    swapped: int = 0

    @property
    def groups(self) -> list[int]:
        """Its groups, in the order of its tokens."""
        return [*(group for block in self.blocks for group in block.groups), *self.private_groups]

    @property
    def rank(self) -> float:
        """The rank in the order of prefill, the smallest first.

        All waiting sequences age alike, so that the current time does not matter.
        """
        return len(self.ids) - self.prefilled + self.arrival * TOKENS_PER_SECOND


class Chunk(NamedTuple):
    """Plans one chunk of a prompt.

    Attributes:
        seq: the number of the sequence.
        slot: the slot that it will decode in.
        place: the place of the prompt's newest queries.
        fresh: whether the prompt begins here, with an empty policy state.
        start, valid: the tokens: `valid` of them, from `start` on.
        groups: the sequence's groups.
        kept: the groups of the compressed prompt, if it ends here and the policy evicts; from then
            on the sequence has no others.
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
    """Plans a prefill program: a chunk each of some prompts.

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
    """Plans steps of the program for a row.

    Attributes:
        seq, slot: the number of the sequence, and its slot.
        steps: the number of its steps; of a verification round, the most tokens that it may yield.
        age: the number of steps that it will have decoded afterwards.
        groups: the groups that are allocated for them.
        first: the number of groups that it had before.
    """

    seq: int
    slot: int
    steps: int
    age: int
    groups: list[int]
    first: int


class SharedPrefix(NamedTuple):
    """Names rows whose first tokens have the same pages.

    Attributes:
        tokens: the number of shared tokens.
        slots: the slots of the rows.
    """

    tokens: int
    slots: list[int]


class DecodePlan(NamedTuple):
    """Plans a program of `steps` decode steps, or a verification round, which counts as one.

    Attributes:
        num_rows: the number of rows that the program is compiled for.
        steps: the number of steps.
        rows: the rows that take part.
        prefixes: the prefixes that rows read together; none: each row reads its own.
        drafts: of a verification round, the most drafts of its program; None: decode steps.
    """

    num_rows: int
    steps: int
    rows: list[RowPlan]
    prefixes: Sequence[SharedPrefix] = ()
    drafts: int | None = None


class Move(NamedTuple):
    """Plans to swap the pages of a sequence out, or in.

    Attributes:
        seq, slot: the number of the sequence, and its slot, which it keeps.
        groups: the groups that move, in the order of its tokens.
        first: the number of groups before them, which stay on the device, since others share them.
    """

    seq: int
    slot: int
    groups: list[int]
    first: int


class StepPlan(NamedTuple):
    """Plans the device's next programs.

    Attributes:
        prefill: the prefill program; None: none.
        decode: the decode program, the last; None: none.
        swapped_in: the sequences to swap in, before everything else.
        swapped_out: those to swap out, between prefill and decoding.
        forgotten: the numbers of sequences that ended while they were swapped out.
    """

    prefill: PrefillPlan | None
    decode: DecodePlan | None
    swapped_in: Sequence[Move] = ()
    swapped_out: Sequence[Move] = ()
    forgotten: Sequence[int] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not any(self)
