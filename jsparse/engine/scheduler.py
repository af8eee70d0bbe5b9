"""Plans the next prompt chunks and decode batch, and allocates their memory.

It uses neither jax nor a clock, so that it can be tested by many simulated events.
A plan is plain numbers: a log of plans replays a session (jsparse.engine.plan_log).
"""

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jsparse.engine.blocks import block_keys
from jsparse.engine.families import families
from jsparse.engine.memory import Memory
from jsparse.engine.sizes import MAX_READING, EngineSizes, Rules
from jsparse.engine.step_plan import (
    Answer,
    Chunk,
    Decode,
    Decoding,
    Family,
    Move,
    Phase,
    Reading,
    StepPlan,
)
from jsparse.runtime.pauses import until_due

# The most milliseconds of a program of several steps where rows may wait for any time: the next one
# is dispatched before its results are there.
PROGRAM_MS = 100
# The part of the time for which rows may wait that reading is planned for: programs may take longer
# than most have, and results are read when the host gets to it.
MARGIN = 0.85
# The most steps of a program while others wait: an answer that ends of itself keeps its slot until
# its program and the next have ended.
BUSY_STEPS = 8


class Estimates(Protocol):
    """Estimates how many milliseconds programs take; None where nothing is known."""

    def reading(self, rows: int, size: int, start: int) -> float | None:
        """Returns the time to read `rows` chunks of `size` tokens, from the position `start` on."""

    def step(self, rows: int, *, exact: bool) -> float | None:
        """Returns the time of a decode step in a program of `rows` rows; if exact, of a round."""

    @property
    def idles(self) -> bool:
        """Whether rows often draft nothing."""
        ...

    def drafts(self, rows: int) -> int:
        """Returns how many tokens the rows of such a program draft next."""
        ...


class _NextChunk(NamedTuple):
    """Describes the chunk of a prompt that would be read next.

    Attributes:
        valid, size: its tokens, and the number that they are padded to.
        last: whether the prompt ends with it.
        replay: whether its K and V are there.
        key: the key of the first block that it completes; None if it completes none.
    """

    valid: int
    size: int
    last: bool
    replay: bool
    key: bytes | None


class Scheduler:
    """Holds all unfinished answers by phase, the waiting ones in a heap, and plans their work."""

    def __init__(
        self,
        sizes: EngineSizes,
        rules: Rules,
        pace: Estimates,
        rows_for: Callable[..., int] | None = None,
        can_run: Callable[..., bool] = lambda rows, answers, drafts=None: True,
    ) -> None:
        """Prepares a scheduler without requests.

        Args:
            sizes: the static sizes.
            rules: the policy's traits.
            pace: how long programs take.
            rows_for: returns the rows of the smallest program that decodes as many, in a round if
                `exact`, and that may be planned now; None is of the smallest.
            can_run: returns whether a special program of so many rows, for the answers of these
                numbers, may be planned now: one that reads once what rows have in common, or a
                round with room for so many `drafts`.
        """
        self.sizes, self.rules, self._pace = sizes, rules, pace
        self._rows_for = rows_for or (lambda count, *, exact: sizes.rows_for(count))
        self._can_run = can_run
        self.memory = Memory(sizes, rules)
        self.pool = self.memory.pool
        self.waiting: list[tuple[float, int, Answer]] = []
        self.reading: list[Answer] = []
        self.decoding: list[Answer] = []
        self.parked: list[Answer] = []
        self._moves: tuple[list[Move], list[Move], list[int]] = [], [], []
        self._joins = itertools.count()
        self._slots = list(range(sizes.num_slots))
        self._places = list(range(MAX_READING))
        self._some_stopped = False
        # whether the next program is to be a round, where there are rows of both kinds, and whether
        # those of that kind have waited while the others decoded
        self._exact_next, self._owed = True, False
        # the milliseconds for which rows have not decoded since prompts were read
        self._stalled: float = 0

    @property
    def idle(self) -> bool:
        """Returns whether there is no answer to work on."""
        return not (self.waiting or self.begun)

    @property
    def begun(self) -> list[Answer]:
        """Returns the answers that have begun and have a slot."""
        return [*self.reading, *self.decoding, *self.parked]

    def add(self, answer: Answer) -> None:
        """Takes in an answer.

        Raises:
            ValueError: it could never fit.
        """
        self.memory.require_room(len(answer.ids), answer.max_tokens)
        answer.keys = self._keys(answer, answer.ids)
        heapq.heappush(self.waiting, (answer.rank, answer.number, answer))

    def gave(self, answer: Answer, planned: int, tokens: int) -> None:
        """Takes in how many tokens a program gave an answer, of as many as were planned."""
        answer.sent -= planned - tokens

    def _keys(self, answer: Answer, ids: np.ndarray) -> list[bytes]:
        """Returns the keys of the blocks of a text that an answer may share."""
        if self.rules.root is None:
            return []
        return block_keys(ids, self.sizes.block_tokens, f"{self.rules.root}\n{answer.salt}")

    def stop(self, answer: Answer, made: Sequence[int] = ()) -> None:
        """Stops an answer in any phase; the next plan drops it.

        Its tokens, if they are given, may be shared as those of its prompt are.
        """
        answer.stopped = self._some_stopped = True
        answer.made = made

    def plan(self) -> StepPlan:
        """Returns the next work, as if it were done at once: plans run in their order."""
        self._moves = resumed, parked, forgotten = [], [], []
        self._let_go()
        self._resume()
        self._admit()
        reading = None if self._owed else self._reading()
        return StepPlan(reading, self._decoding(), resumed, parked, forgotten)

    def _let_go(self) -> None:
        """Frees the memory of answers that were stopped or have all their tokens planned."""
        if self._some_stopped:
            self._some_stopped = False
            for _, _, answer in self.waiting:
                if answer.stopped:
                    answer.phase = Phase.ENDED
            self.waiting = [entry for entry in self.waiting if not entry[2].stopped]
            heapq.heapify(self.waiting)
        for answer in self.begun:
            # what a round gives is known later, and stops an answer then
            if answer.stopped or (answer.sent == answer.max_tokens and not answer.exact):
                self._end(answer)

    def _end(self, answer: Answer) -> None:
        if answer.phase is Phase.PARKED:
            self.memory.forget(answer)
            self._moves[2].append(answer.number)
        lists = {Phase.READING: self.reading, Phase.PARKED: self.parked}
        lists.get(answer.phase, self.decoding).remove(answer)
        self._leave_place(answer)
        heapq.heappush(self._slots, answer.slot)
        in_place = answer.phase is not Phase.PARKED
        if in_place and (self.rules.answers or answer.exact) and len(answer.made) > 1:
            # K and V of the newest have not been computed
            text = np.concatenate([answer.ids, np.asarray(answer.made[:-1], np.int32)])
            answer.keys, answer.read = self._keys(answer, text), len(text)
            self.memory.share(answer)
        self.memory.release(answer)
        answer.phase = Phase.ENDED

    def _admit(self) -> None:
        """Gives free slots and memory to waiting answers, the shortest first.

        None begins while one that has begun is parked.
        """
        while self.waiting and self._slots and not self.parked:
            answer = self.waiting[0][2]
            if not self.memory.admit(answer, self.begun):
                return
            heapq.heappop(self.waiting)
            answer.slot, answer.phase = heapq.heappop(self._slots), Phase.READING
            self.reading.append(answer)

    def _resume(self) -> None:
        """Brings parked answers back, the first to have joined first, where there is room.

        Those that decode keep room to grow.
        """
        for answer in sorted(self.parked, key=lambda answer: answer.joined):
            first = self.memory.num_groups(answer)
            groups = self.memory.resume(answer, self.sizes.growth * len(self.decoding))
            if not groups:
                return
            self._moves[0].append(Move(answer.number, answer.slot, list(groups), first))
            self.parked.remove(answer)
            answer.phase = Phase.DECODING
            insort(self.decoding, answer, key=lambda answer: answer.joined)

    def _park_for(self, answer: Answer, planned: list[Answer]) -> bool:
        """Parks the last to have joined, so that an answer can grow; returns whether it did.

        Those that are `planned` stay, and those that joined before the answer. It is parked itself
        if it is the last, unless it is alone: prompts that are being read will join. Nobody is
        where one has all its tokens planned: the next plan has its memory.
        """
        if any(o.sent == o.max_tokens and not o.exact for o in self.decoding if o not in planned):
            return False
        later = [o for o in self.decoding if o not in planned and o.joined >= answer.joined]
        last = next((o for o in reversed(later) if self.memory.can_park(o)), None)
        if last is None or len(self.decoding) == 1:
            return False
        groups = self.memory.park(last, self.parked)
        first = self.memory.num_groups(last)
        self._moves[1].append(Move(last.number, last.slot, groups, first))
        self.decoding.remove(last)
        self.parked.append(last)
        last.phase = Phase.PARKED
        return True

    def _reading(self) -> Reading | None:
        """Plans to read a chunk of the prompt with the least left to read; waiting counts, too."""
        candidates = self._candidates()
        if not candidates:
            return None
        for answer in candidates[: max(self.sizes.prefill_rows)]:
            self.memory.take_over(answer)
        first = self._next_chunk(candidates[0])
        together = self._together(candidates, first)
        chunks = [self._read(answer, first) for answer in together]
        if first.last:
            ended = zip(chunks, together, strict=True)
            chunks = [chunk._replace(kept=self._begin_decoding(answer)) for chunk, answer in ended]
        num_rows = next(rows for rows in self.sizes.prefill_rows if rows >= len(chunks))
        self._stalled += self._milliseconds(num_rows, first.size, max(c.start for c in chunks))
        return Reading(num_rows, first.size, first.last, first.replay, chunks)

    def _candidates(self) -> list[Answer]:
        """Returns the answers whose prompts may be read on now, in that order."""
        order = sorted(self.reading, key=lambda answer: (answer.rank, answer.number))
        others = [answer for answer in order if answer.place < 0]
        allowed = set(others[: len(self._places)])
        return [answer for answer in order if answer.place >= 0 or answer in allowed]

    def _together(self, candidates: list[Answer], first: _NextChunk) -> list[Answer]:
        """Returns the answers, with the first candidate, whose chunks one program reads.

        A program for several is worth while where they fill at least half of it.
        """
        chosen, keys = [], set()
        for answer in candidates[: max(self.sizes.prefill_rows)]:
            chunk = self._next_chunk(answer)
            # what one of them reads, the others will take over
            if chunk[1:4] == first[1:4] and (chunk.key is None or chunk.key not in keys):
                chosen.append(answer)
                keys.add(chunk.key)
        if first.size <= self.sizes.packed_tokens and not first.replay:
            for rows in reversed(self.sizes.prefill_rows):
                part = chosen[:rows]
                tokens = sum(self._next_chunk(answer).valid for answer in part)
                half_full = 2 * tokens >= rows * first.size
                start = max(answer.read for answer in part)
                if half_full and not self._too_slow(rows, first.size, start):
                    return part
        return candidates[:1]

    def _next_chunk(self, answer: Answer) -> _NextChunk:
        """Describes the chunk that would be read next of a prompt."""
        sizes, start, end = self.sizes, answer.read, len(answer.ids)
        maximum = sizes.chunk_size(start)
        if start < answer.known:
            return _NextChunk(min(maximum, answer.known - start), maximum, False, True, None)
        if not sizes.batch_invariant:
            allowed = [size for size in sizes.full_sizes if size <= maximum]
            fast = (size for size in allowed if not self._too_slow(1, size, start))
            maximum = next(fast, allowed[-1])
        valid, size = sizes.next_chunk(start, end, maximum)
        block = start // sizes.block_tokens
        completes = (block + 1) * sizes.block_tokens <= start + valid and block < len(answer.keys)
        key = answer.keys[block] if completes else None
        return _NextChunk(valid, size, start + valid == end, False, key)

    def _read(self, answer: Answer, like: _NextChunk) -> Chunk:
        """Plans to read the next chunk of a prompt, in a program for chunks `like` it."""
        if answer.place < 0:
            answer.place = heapq.heappop(self._places)
        start, valid = answer.read, self._next_chunk(answer).valid
        chunk = Chunk(
            answer=answer.number,
            slot=answer.slot,
            place=answer.place,
            fresh=answer.fresh,
            start=start,
            valid=valid,
            groups=list(answer.groups),
        )
        answer.read, answer.fresh = start + valid, False
        if not like.replay:
            answer.known = answer.read
            if valid == self.sizes.chunk_size(start) or not self.sizes.batch_invariant:
                self.memory.share(answer)
        return chunk

    def _begin_decoding(self, answer: Answer) -> list[int]:
        """Lets an answer decode; returns the groups that its prompt is compressed into."""
        self._leave_place(answer)
        self.reading.remove(answer)
        self.decoding.append(answer)
        answer.phase, answer.sent, answer.joined = Phase.DECODING, 1, next(self._joins)
        return self.memory.compress(answer)

    def _leave_place(self, answer: Answer) -> None:
        if answer.place >= 0:
            heapq.heappush(self._places, answer.place)
            answer.place = -1

    def _too_slow(self, rows: int, size: int, start: int) -> bool:
        """Returns whether rows that decode would have to wait too long for these chunks."""
        return self._milliseconds(rows, size, start) > self._patience

    @property
    def _patience(self) -> float:
        """The milliseconds for which reading may go on, if the next program decodes."""
        maximum = self.sizes.max_stall_ms
        if maximum is None:
            return math.inf
        return MARGIN * maximum - sum(map(self._step_milliseconds, (False, True)))

    def _milliseconds(self, rows: int, size: int, start: int) -> float:
        """Returns the time that a program takes to read these chunks; infinity if unknown."""
        took = self._pace.reading(rows, size, start)
        return math.inf if took is None else took

    def _step_milliseconds(self, exact: bool) -> float:
        """Returns the time of a round if exact, else of a step; 0 if no row decodes so.

        It is infinity if unknown.
        """
        count = sum(answer.exact == exact for answer in self.decoding)
        if not count:
            return 0
        took = self._pace.step(self._rows_for(count, exact=exact), exact=exact)
        return math.inf if took is None else took

    def _decoding(self) -> Decoding | None:
        """Plans the next decode steps, unless prompts are read first."""
        maximum = self.sizes.max_stall_ms
        following = [] if self._owed else self._candidates()
        if following and maximum is None:
            return None
        if following:
            size = self._next_chunk(following[0]).size
            later = self._milliseconds(1, size, following[0].read)
            if self._stalled + later <= self._patience:
                return None
        self._stalled = 0
        # rounds and programs of steps take turns, and both have had theirs before one reads on
        owed, self._owed = self._owed, False
        for exact in (self._exact_next, not self._exact_next):
            if (planned := self._steps_or_round(exact)) is not None:
                self._exact_next = not exact
                self._owed = not owed and any(answer.exact != exact for answer in self.decoding)
                return planned
        return None

    def _steps_or_round(self, exact: bool) -> Decoding | None:
        """Plans a round of the rows that are exact, or steps of the others, if there are any."""
        wanting = [
            answer
            for answer in self.decoding
            if answer.exact == exact and answer.sent < answer.max_tokens
        ]
        if not wanting:
            return None
        rows, answers = [], []
        most = steps = 1 if exact else self._steps()
        if exact:
            most += self._pace.drafts(self._rows_for(len(wanting), exact=True))
        for answer in wanting:
            while answer.phase is Phase.DECODING and self.memory.lacks_pages(answer, self.begun):
                if not self._park_for(answer, answers):
                    break
            if answer.phase is Phase.PARKED:
                continue
            count = min(most, answer.max_tokens - answer.sent)
            first = self.memory.num_groups(answer)
            groups = self.memory.grow(answer, count, self.begun)
            count = self.memory.steps_left(answer, count)
            if count > 0:
                answer.sent += count
                row = (answer.number, answer.slot, count, answer.sent - 1)
                rows.append(Decode(*row, groups=groups, first=first))
                answers.append(answer)
        if not rows:
            return None
        num_rows = self._rows_for(len(rows), exact=exact)
        if exact:
            drafts, numbers = self.sizes.drafts_for(num_rows), [row.answer for row in rows]
            if most == 1 and self._pace.idles and self._can_run(num_rows, numbers, 0):
                drafts = 0
            return Decoding(num_rows, steps, rows, drafts=drafts)
        return Decoding(num_rows, steps, rows, self._families(answers, num_rows))

    def _families(self, answers: list[Answer], num_rows: int) -> list[Family]:
        """Returns the rows that read together what they have in common."""
        if not self.sizes.family_rows:
            return []
        found = families(answers, *self.sizes.families(num_rows), self.sizes.block_tokens)
        numbers = [answer.number for answer in answers]
        return found if found and self._can_run(num_rows, numbers) else []

    def _steps(self) -> int:
        """Returns the number of steps of the next program.

        It is the maximum unless something waits for the program's end: a prompt that is being read,
        a row that is due for service before, an answer that gets the slot or the memory of a row
        that ends, or whoever waits for tokens. What comes in the meantime waits for two programs.
        Rows that decode in rounds get about as many tokens in between.
        """
        if self.reading or not self.decoding:
            return 1
        some_wait = self.waiting or self.parked
        steps = min(self.sizes.steps, BUSY_STEPS) if some_wait else self.sizes.steps
        rows = [answer for answer in self.decoding if not answer.exact]
        if len(rows) < len(self.decoding):
            steps = min(steps, 1 + max(self.sizes.drafts))
        left = [answer.max_tokens - answer.sent for answer in rows]
        ends = [max(left, default=0)]
        if some_wait:
            ends += [steps for steps in left if steps > 0]
        for answer in rows:
            ends += until_due(self.rules.periods, answer.sent - 1)
        maximum, of_one = self.sizes.max_stall_ms, self._step_milliseconds(exact=False)
        maximum = PROGRAM_MS if maximum is None else maximum / 2
        if steps * of_one > maximum:
            steps = max(1, int(maximum / of_one))
        return min(steps, *ends)
