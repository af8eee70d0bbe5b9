"""Decides what the device does next: whose prompt is read, who decodes, who gets which memory.

It uses neither jax nor a clock, so that it can be tested by many simulated events.
A plan is plain numbers: a log of plans replays a session (jsparse.engine.plan_log).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from jsparse.engine.blocks import BlockPool, CacheBlock, block_keys
from jsparse.runtime.pauses import next_steps, until_due

# A request that has waited a second counts as this many tokens shorter: about what an 8B model
# reads in a second, so that the shortest goes first and none waits forever.
TOKENS_PER_SECOND = 20_000
# prompts that may be partly read at a time; each has state of its own on the device
MAX_READING = 4


class EngineSizes(NamedTuple):
    """Holds the static sizes of an engine.

    Attributes:
        num_slots: the most requests that decode together, B.
        max_model_len: the most tokens of prompt and answer together.
        page_size: the number of tokens per page.
        num_groups: the number of groups of pages, of which the last is scratch.
        ladder: the sizes of prompt chunks, as (position, size) pairs: the size counts from that
            position on. Chunks begin where position alone says, so that what another request has
            read of the same prompt is, bit for bit, what would be read again.
        tails: the sizes that a prompt's last chunk may be padded to, beside those of the ladder.
        block_tokens: the number of tokens per block that requests share.
        steps: the most decode steps per program.
        rows: the numbers of rows for which decode programs are made, rising up to num_slots.
    """

    num_slots: int
    max_model_len: int
    page_size: int
    num_groups: int
    ladder: tuple[tuple[int, int], ...]
    tails: tuple[int, ...]
    block_tokens: int
    steps: int
    rows: tuple[int, ...]

    def chunk_size(self, position: int) -> int:
        """Returns the size of the chunk that begins at a position."""
        return next(size for first, size in reversed(self.ladder) if position >= first)

    def chunk_start(self, position: int) -> int:
        """Returns the last start of a chunk at or before a position."""
        first, size = next(step for step in reversed(self.ladder) if position >= step[0])
        return first + (position - first) // size * size

    def padded(self, tokens: int, position: int) -> int:
        """Returns the size to which a chunk of `tokens` at a position is padded."""
        maximum = self.chunk_size(position)
        sizes = {size for _, size in self.ladder} | set(self.tails)
        return min(size for size in sizes if tokens <= size <= maximum)

    def chunks(self, start: int, end: int) -> list[tuple[int, bool]]:
        """Returns the chunks that tokens from `start` to `end` are read in, as (size, last)."""
        chunks = []
        while start < end:
            valid = min(self.chunk_size(start), end - start)
            chunks.append((self.padded(valid, start), start + valid == end))
            start += valid
        return chunks

    def rows_for(self, slot: int) -> int:
        """Returns the rows of the smallest decode program that has a slot and those below it."""
        return next(rows for rows in self.rows if rows > slot)

    def groups_for(self, tokens: int) -> int:
        """Returns the number of groups that hold this many tokens."""
        return -(-tokens // self.page_size)


class Rules(NamedTuple):
    """Holds what the scheduler must know of a policy.

    Attributes:
        root: what K and V depend on beside the tokens; None if nothing may be shared.
        window: the last tokens of a prompt that must be read by the request itself.
        replays: whether a row's state must be built anew from K and V that are shared.
        periods: numbers of decoded tokens after which a row is serviced, by a program of its own.
    """

    root: str | None
    window: int
    replays: bool
    periods: tuple[int, ...]


Phase = Enum("Phase", ["WAITING", "READING", "DECODING", "ENDED"])


@dataclass(eq=False)
class Answer:
    """Holds one answer to one prompt, as the scheduler sees it.

    Attributes:
        number: what plans call it.
        ids: the prompt.
        max_tokens: the number of tokens after which it ends.
        born: when it came, in seconds.
        keys: the keys of the prompt's blocks.
        phase, slot: where it is.
        read: the number of the prompt's tokens that its state has seen, or will have by plan.
        known: the number of those whose K and V are there; more than `read` while what was taken
            over is replayed.
        cached: the number of tokens that were taken over from other requests.
        sent: the number of its tokens that have been planned.
        stopped: whether it wants no more tokens.
        salt: what those who share its blocks have in common beside the tokens.
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
        """Returns what the order of reading goes by, the smallest first.

        All waiting requests age alike, so that the time it is now does not matter.
        """
        return len(self.ids) - self.read + self.born * TOKENS_PER_SECOND


class Chunk(NamedTuple):
    """Says which tokens of which prompt to read.

    Attributes:
        answer: the number of the answer.
        slot: the slot that it will decode in.
        fresh: whether it begins here, with a state of rows that have seen nothing.
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
    """Says that a row decodes `steps` steps of the program; it has decoded `age` steps then."""

    answer: int
    slot: int
    steps: int
    age: int


class StepPlan(NamedTuple):
    """Says what the device does next: a chunk, then one program of `steps` decode steps.

    `ended` are the answers whose prompts were partly read and will not be read on.
    """

    ended: list[int]
    chunk: Chunk | None
    steps: int
    rows: list[Decode]

    @property
    def empty(self) -> bool:
        """Returns whether there is nothing to do."""
        return not (self.ended or self.chunk or self.rows)


class Scheduler:
    """Holds all answers that have not ended, by phase (those that wait as a heap), and plans."""

    def __init__(self, sizes: EngineSizes, rules: Rules) -> None:
        """Prepares a scheduler without requests."""
        self.sizes, self.rules = sizes, rules
        self.pool = BlockPool(sizes.num_groups)
        self.waiting: list[tuple[float, int, Answer]] = []
        self.reading: list[Answer] = []
        self.decoding: list[Answer] = []
        # the lowest are taken first, so that few rows run in programs of few rows
        self._slots = list(range(sizes.num_slots))
        self._partly: set[Answer] = set()
        self._some_stopped = False

    @property
    def idle(self) -> bool:
        """Returns whether there is no answer to work on."""
        return not (self.waiting or self.reading or self.decoding)

    def add(self, answer: Answer) -> None:
        """Takes in an answer.

        Raises:
            ValueError: it could never fit.
        """
        self.require_room(len(answer.ids), answer.max_tokens)
        if self.rules.root is not None:
            root = f"{self.rules.root}\n{answer.salt}"
            answer.keys = block_keys(answer.ids, self.sizes.block_tokens, root)
        heapq.heappush(self.waiting, (answer.rank, answer.number, answer))

    def require_room(self, prompt: int, max_tokens: int) -> None:
        """Raises ValueError unless a prompt and an answer of these sizes can be served at all."""
        sizes, tokens = self.sizes, prompt + max_tokens
        if tokens > sizes.max_model_len:
            raise ValueError(
                f"prompt of {prompt} tokens + max_tokens={max_tokens} is {tokens}: must be at most "
                f"max_model_len={sizes.max_model_len}"
            )
        if sizes.groups_for(tokens) > self.pool.size:
            raise ValueError(
                f"prompt of {prompt} tokens + max_tokens={max_tokens} is {tokens}: must fit in the "
                f"{self.pool.size * sizes.page_size} tokens of K and V that the engine holds"
            )

    def stop(self, answer: Answer) -> None:
        """Stops an answer in any phase; the next plan lets go of it."""
        answer.stopped = self._some_stopped = True

    def plan(self) -> StepPlan:
        """Returns what to do next, as if it were done at once: plans run in their order."""
        ended = self._let_go()
        self._admit()
        chunk = self._chunk()
        steps = self._steps()
        rows = []
        for answer in self.decoding:
            count = min(steps, answer.max_tokens - answer.sent)
            if count > 0:
                answer.sent += count
                rows.append(Decode(answer.number, answer.slot, count, answer.sent - 1))
        return StepPlan(ended, chunk, steps if rows else 0, rows)

    def _let_go(self) -> list[int]:
        """Frees what answers held that have been stopped or have all their tokens planned.

        Returns the numbers of those that were being read.
        """
        if self._some_stopped:
            self._some_stopped = False
            for _, _, answer in self.waiting:
                if answer.stopped:
                    answer.phase = Phase.ENDED
            self.waiting = [entry for entry in self.waiting if not entry[2].stopped]
            heapq.heapify(self.waiting)
        unread = [answer.number for answer in self._partly if answer.stopped]
        for answer in [*self.reading, *self.decoding]:
            if answer.stopped or answer.sent == answer.max_tokens:
                self._end(answer)
        return sorted(unread)

    def _end(self, answer: Answer) -> None:
        (self.reading if answer.phase is Phase.READING else self.decoding).remove(answer)
        self._partly.discard(answer)
        heapq.heappush(self._slots, answer.slot)
        self.pool.drop(answer.blocks)
        self.pool.give_back(answer.own)
        answer.blocks, answer.own, answer.phase = [], [], Phase.ENDED

    def _admit(self) -> None:
        """Gives slots and memory to those who wait, the shortest first, while there are any.

        All that an answer may need is taken at once, so that none is ever thrown out.
        """
        while self.waiting and self._slots:
            answer = self.waiting[0][2]
            shared = answer.keys[: self._shareable(answer)]
            wanted = self.sizes.groups_for(len(answer.ids) + answer.max_tokens)
            wanted -= len(shared) * self._block_groups
            if wanted > self.pool.available - self.pool.idle(shared):
                return
            heapq.heappop(self.waiting)
            answer.blocks = self.pool.hold(shared)
            answer.own = self.pool.take(wanted)
            answer.known = answer.cached = len(shared) * self.sizes.block_tokens
            answer.read = 0 if self.rules.replays else answer.known
            answer.slot, answer.phase = heapq.heappop(self._slots), Phase.READING
            self.reading.append(answer)

    def _chunk(self) -> Chunk | None:
        """Plans the next chunk: of the prompt of which least is left, the oldest a bit earlier."""
        full = len(self._partly) >= MAX_READING
        allowed = [answer for answer in self.reading if not full or answer in self._partly]
        if not allowed:
            return None
        answer = min(allowed, key=lambda answer: (answer.rank, answer.number))
        fresh = self._take_over(answer) or answer not in self._partly
        replay = answer.read < answer.known
        start, maximum = answer.read, self.sizes.chunk_size(answer.read)
        valid = min(maximum, len(answer.ids) - start)
        size, last = self.sizes.padded(valid, start), start + valid == len(answer.ids)
        answer.read += valid
        self._partly.add(answer)
        if not replay:
            answer.known = answer.read
            if valid == maximum:
                self._share(answer)
        if last:
            self._partly.discard(answer)
            self.reading.remove(answer)
            self.decoding.append(answer)
            answer.phase, answer.sent = Phase.DECODING, 1
        return Chunk(
            *(answer.number, answer.slot, fresh, replay, start, valid, size, last),
            list(answer.groups),
        )

    def _shareable(self, answer: Answer) -> int:
        """Returns the number of leading blocks of a prompt that the pool has and it may use."""
        sizes = self.sizes
        maximum = len(answer.ids) - max(1, self.rules.window)
        known = self.pool.known(answer.keys) * sizes.block_tokens
        return sizes.chunk_start(max(0, min(maximum, known))) // sizes.block_tokens

    def _take_over(self, answer: Answer) -> bool:
        """Uses what others have read of the prompt since.

        Returns whether the state must begin anew: it has not seen what lies between, unless that
        is replayed.
        """
        blocks = self._shareable(answer)
        tokens = blocks * self.sizes.block_tokens
        if tokens <= answer.known:
            return False
        held = len(answer.blocks)
        groups = (blocks - held) * self._block_groups
        answer.blocks += self.pool.hold(answer.keys[held:blocks])
        self.pool.give_back(answer.own[:groups])
        answer.own = answer.own[groups:]
        answer.cached += tokens - answer.known
        answer.known = tokens
        if self.rules.replays:
            return False
        answer.read = tokens
        return True

    def _share(self, answer: Answer) -> None:
        """Lets others use the whole blocks of what has been read, unless they have their own."""
        for key in answer.keys[len(answer.blocks) : answer.read // self.sizes.block_tokens]:
            if self.pool.known([key]):
                return
            groups = answer.own[: self._block_groups]
            answer.own = answer.own[self._block_groups :]
            answer.blocks.append(self.pool.share(key, groups))

    @property
    def _block_groups(self) -> int:
        return self.sizes.block_tokens // self.sizes.page_size

    def _steps(self) -> int:
        """Returns the number of steps of the next program.

        It is the most where nobody waits for its end: no prompt that is being read, no row that is
        due for service before, and nobody who gets the slot or the memory of a row that ends.
        """
        maximum = self.sizes.steps
        left = [answer.max_tokens - answer.sent for answer in self.decoding]
        if self.reading or (self.waiting and min(left, default=0) < maximum):
            return 1
        pauses = [
            steps
            for answer in self.decoding
            for steps in until_due(self.rules.periods, answer.sent - 1)
        ]
        return next_steps(maximum, [max(left, default=0), *pauses])
