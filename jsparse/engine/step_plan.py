"""Defines StepPlan, the next work of the device, and Answer, the planned state of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from jsparse.engine.blocks import CacheBlock

# A request that has waited a second counts as this many tokens shorter: about what an 8B model
# reads in a second, so that the shortest goes first and none waits forever.
TOKENS_PER_SECOND = 20_000

Phase = Enum("Phase", ["WAITING", "READING", "DECODING", "ENDED"])


@dataclass(eq=False)
class Answer:
    """Holds one answer to one prompt, as the scheduler sees it.

    Attributes:
        number: its name in plans.
        ids: the prompt.
        max_tokens: the number of tokens after which it ends.
        born: when it came, in seconds.
        keys: the keys of the prompt's blocks.
        phase, slot: its phase and slot.
        read: the number of the prompt's tokens that its state has seen, or will have by plan.
        known: the number of those whose K and V are there; more than `read` while tokens from other
            requests are replayed.
        cached: the number of tokens that were taken over from other requests.
        sent: the number of its tokens that have been planned.
        stopped: whether it wants no more tokens.
        salt: the secret that answers must have in common to share its blocks.
        blocks: the blocks that it holds, from the prompt's beginning on.
        own: the groups behind them.
    """

    number: int
    ids: Sequence[int]
    max_tokens: int
    born: float
    keys: list[bytes] = field(default_factory=list)
    salt: str = ""
    phase: Phase = Phase.WAITING
    slot: int = -1
    read: int = 0
    known: int = 0
    cached: int = 0
    sent: int = 0
    stopped: bool = False
    blocks: list[CacheBlock] = field(default_factory=list)
    own: list[int] = field(default_factory=list)

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
        fresh: whether the prompt begins here, with an empty policy state.
        replay: whether K and V are there, and only the policy's state is to be built from them.
        start, valid, size: the tokens: from `start` on, `valid` of them, padded to `size`.
        last: whether the prompt ends here: the first token is chosen and the answer decodes.
        groups: the answer's groups.
    """

    answer: int
    slot: int
    fresh: bool
    replay: bool
    start: int
    valid: int
    size: int
    last: bool
    groups: list[int]


class Decode(NamedTuple):
    """Plans `steps` steps of the program for a row, which will have decoded `age` steps then."""

    answer: int
    slot: int
    steps: int
    age: int


class StepPlan(NamedTuple):
    """Plans the device's next work: a chunk, then one program of `steps` decode steps.

    `ended` are the answers that stopped while their prompts were being read.
    """

    ended: list[int]
    chunk: Chunk | None
    steps: int
    rows: list[Decode]

    @property
    def empty(self) -> bool:
        """Returns whether there is nothing to do."""
        return not (self.ended or self.chunk or self.rows)
