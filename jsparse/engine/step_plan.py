"""Defines StepPlan, the next work of the device, and Answer, the planned state of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from jsparse.engine.blocks import CacheBlock

# A request that has waited a second counts as this many tokens shorter: about what an 8B model
# reads in a second, so that the shortest goes first and none waits forever.
TOKENS_PER_SECOND = 20_000

Phase = Enum("Phase", ["WAITING", "READING", "DECODING", "SWAPPED", "ENDED"])


@dataclass(eq=False)
class Answer:
    """Holds one answer to one prompt, as the scheduler sees it.

    Attributes:
        number: its name in plans.
        ids: the prompt, int32 [T].
        max_tokens: the number of tokens after which it ends.
        born: when it came, in seconds.
        keys: the keys of the prompt's blocks.
        phase, slot: its phase and slot.
        place: the place of its newest queries while its prompt is partly read, else -1.
        fresh: whether the policy's state of it is to begin anew with the next chunk.
        read: the number of the prompt's tokens that its state has seen, or will have by plan.
        known: the number of those whose K and V are there; more than `read` while tokens from other
            requests are replayed.
        cached: the number of tokens that were taken over from other requests.
        sent: the number of its tokens that have been planned; of a round whose results are not
            there, the most that it can give.
        stopped: whether it wants no more tokens.
        salt: the secret that answers must have in common to share its blocks.
        made: its tokens, where it has stopped and others may share them.
        blocks: the blocks that it holds, from the prompt's beginning on.
        own: the groups behind them.
        kept: the groups into which its prompt will be compressed, where the policy evicts.
        joined: its place in the order in which answers have begun to decode.
        swapped: the groups whose pages host memory holds for it.
    """

    number: int
    ids: np.ndarray
    max_tokens: int
    born: float
    keys: list[bytes] = field(default_factory=list)
    salt: str = ""
    phase: Phase = Phase.WAITING
    slot: int = -1
    place: int = -1
    fresh: bool = True
    read: int = 0
    known: int = 0
    cached: int = 0
    sent: int = 0
    stopped: bool = False
    made: Sequence[int] = ()
    blocks: list[CacheBlock] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    joined: int = 0
    swapped: int = 0

    @property
    def groups(self) -> list[int]:
        """Returns its groups, in the order of its tokens."""
        return [*(group for block in self.blocks for group in block.groups), *self.own]

    @property
    def rank(self) -> float:
        """Returns the rank in the order of reading, the smallest first.

        All waiting requests age alike, so that the time it is now does not matter.
        """
        return len(self.ids) - self.read + self.born * TOKENS_PER_SECOND


class Chunk(NamedTuple):
    """Plans the reading of one chunk of a prompt.

    Attributes:
        answer: the number of the answer.
        slot: the slot that it will decode in.
        place: the place of the prompt's newest queries while it is being read.
        fresh: whether the prompt begins here, with an empty policy state.
        start, valid: the tokens: from `start` on, `valid` of them.
        groups: the answer's groups.
        kept: the groups that the policy compresses the prompt into when it ends here; the answer
            has no others from then on. None are that it decodes in those it was read into.
    """

    answer: int
    slot: int
    place: int
    fresh: bool
    start: int
    valid: int
    groups: list[int]
    kept: Sequence[int] = ()


class Reading(NamedTuple):
    """Plans a program that reads a chunk each of some prompts.

    Attributes:
        num_rows: the number of prompts that the program reads, these among them.
        size: the number of tokens that each chunk is padded to.
        last: whether these prompts end here: first tokens are chosen, and the answers decode.
        replay: whether K and V are there, and only the policy's state is to be built from them.
        chunks: the chunks.
    """

    num_rows: int
    size: int
    last: bool
    replay: bool
    chunks: list[Chunk]


class Decode(NamedTuple):
    """Plans steps of the program for a row.

    Attributes:
        answer, slot: the number of the answer, and its slot.
        steps: the number of steps in which it takes part; of a round, the most tokens that it may
            give.
        age: the number of steps that it will have decoded then.
        groups: the groups that it gets for them.
        first: the number of groups that it has had before.
    """

    answer: int
    slot: int
    steps: int
    age: int
    groups: list[int]
    first: int


class SharedPrefix(NamedTuple):
    """Names rows whose first tokens lie in the same pages.

    Attributes:
        tokens: the number of these tokens.
        slots: the slots of the rows.
    """

    tokens: int
    slots: list[int]


class Decoding(NamedTuple):
    """Plans a program of `steps` decode steps, or a round of speculation, which counts as one.

    Attributes:
        num_rows: the number of rows that the program computes, these among them.
        steps: the number of steps.
        rows: the rows that take part.
        prefixes: those of them that read pages together; if there are none, the program is one in
            which each row reads its own.
        drafts: of a round, the tokens that its program has room to draft; None is of steps.
    """

    num_rows: int
    steps: int
    rows: list[Decode]
    prefixes: Sequence[SharedPrefix] = ()
    drafts: int | None = None


class Move(NamedTuple):
    """Plans that the pages of an answer leave the device for host memory, or that they come back.

    Attributes:
        answer, slot: the number of the answer, and its slot, which it keeps.
        groups: the groups that move, in the order of its tokens.
        first: the number of groups before them, which stay: others use them, too.
    """

    answer: int
    slot: int
    groups: list[int]
    first: int


class StepPlan(NamedTuple):
    """Plans the device's next work, in the order of doing.

    Attributes:
        reading: the prompts that are read; None is none.
        decoding: the rows that decode, last; None is none.
        swapped_in: the answers whose pages come back from host memory, first of all.
        swapped_out: those whose pages leave, between reading and decoding.
        forgotten: the numbers of answers that ended while they were swapped out.
    """

    reading: Reading | None
    decoding: Decoding | None
    swapped_in: Sequence[Move] = ()
    swapped_out: Sequence[Move] = ()
    forgotten: Sequence[int] = ()

    @property
    def empty(self) -> bool:
        """Returns whether there is nothing to do."""
        return not any(self)
