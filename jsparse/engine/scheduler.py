"""Plans the next prefill and decode programs, and allocates their memory.

It uses neither jax nor a clock, so that many simulated events can test it. A plan is plain numbers:
the same plans give the same bits again.
"""

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Sequence

import numpy as np

from jsparse.engine.blocks import block_keys
from jsparse.engine.memory import Memory
from jsparse.engine.prompts import Prompts
from jsparse.engine.shared_prefixes import shared_prefixes
from jsparse.engine.sizes import EngineSizes, Rules
from jsparse.engine.stall_budget import Estimates, StallBudget
from jsparse.engine.step_plan import (
    Answer,
    Decode,
    Decoding,
    Move,
    Phase,
    Reading,
    SharedPrefix,
    StepPlan,
)
from jsparse.runtime.pauses import until_due

# The most steps of a program while others wait: an answer that finishes early keeps its slot until
# its program and the next one have finished.
BUSY_STEPS = 8


class Scheduler:
    """Holds all unfinished answers by phase, and plans their programs."""

    def __init__(
        self,
        sizes: EngineSizes,
        rules: Rules,
        latency: Estimates,
        rows_for: Callable[..., int] | None = None,
        can_run: Callable[..., bool] = lambda rows, answers, drafts=None: True,
    ) -> None:
        """Creates a scheduler without requests.

        Args:
            sizes: the static sizes.
            rules: the policy's traits.
            latency: estimates of the times of programs.
            rows_for: returns the size of the smallest compiled program for at least n rows; None:
                all programs count as compiled.
            can_run: returns whether an optional program of `rows` rows, for the answers of these
                numbers, is compiled: one for shared prefixes, or a verification round with room for
                `drafts` drafts.
        """
        self.sizes, self.rules, self._latency = sizes, rules, latency
        self._rows_for = rows_for or sizes.rows_for
        self._can_run = can_run
        self.memory = Memory(sizes, rules)
        self.pool = self.memory.pool
        self.waiting: list[tuple[float, int, Answer]] = []
        self.decoding: list[Answer] = []
        self.swapped: list[Answer] = []
        self._stall = StallBudget(sizes, latency, self._rows_for, self.decoding)
        self.prompts = Prompts(sizes, self.memory, self._stall)
        self._moves: tuple[list[Move], list[Move], list[int]] = [], [], []
        self._joins = itertools.count()
        self._slots = list(range(sizes.num_slots))
        self._some_stopped = False

    @property
    def reading(self) -> list[Answer]:
        """The answers in prefill."""
        return self.prompts.answers

    @property
    def idle(self) -> bool:
        """Whether there is no answer to work on."""
        return not (self.waiting or self.begun)

    @property
    def begun(self) -> list[Answer]:
        """The answers that have begun and have a slot."""
        return [*self.reading, *self.decoding, *self.swapped]

    def add(self, answer: Answer) -> None:
        """Queues an answer.

        Raises:
            ValueError: it could never fit.
        """
        self.memory.require_room(len(answer.ids), answer.max_tokens)
        answer.keys = self._keys(answer, answer.ids)
        heapq.heappush(self.waiting, (answer.rank, answer.number, answer))

    def gave(self, answer: Answer, planned: int, tokens: int) -> None:
        """Replaces an answer's planned number of tokens by the actual one."""
        answer.sent -= planned - tokens

    def _keys(self, answer: Answer, ids: np.ndarray) -> list[bytes]:
        """Returns the keys of the blocks of `ids` that an answer may share."""
        if self.rules.root is None:
            return []
        return block_keys(ids, self.sizes.block_tokens, f"{self.rules.root}\n{answer.salt}")

    def stop(self, answer: Answer, made: Sequence[int] = ()) -> None:
        """Stops an answer in any phase; the next plan removes it.

        Its tokens `made`, if given, may be shared as its prompt is.
        """
        answer.stopped = self._some_stopped = True
        answer.made = made

    def plan(self) -> StepPlan:
        """Returns the next programs; the state is then that after they have run."""
        self._moves = swapped_in, swapped_out, forgotten = [], [], []
        self._let_go()
        self._swap_in()
        self._admit()
        return StepPlan(self._reading(), self._decoding(), swapped_in, swapped_out, forgotten)

    def _let_go(self) -> None:
        """Frees the memory of answers that have stopped or have all their tokens planned."""
        if self._some_stopped:
            self._some_stopped = False
            for _, _, answer in self.waiting:
                if answer.stopped:
                    answer.phase = Phase.ENDED
            self.waiting = [entry for entry in self.waiting if not entry[2].stopped]
            heapq.heapify(self.waiting)
        for answer in self.begun:
            # a round's token count is known only when its results arrive
            if answer.stopped or (answer.sent == answer.max_tokens and not self.sizes.drafts):
                self._end(answer)

    def _end(self, answer: Answer) -> None:
        match answer.phase:
            case Phase.READING:
                self.prompts.end(answer)
            case Phase.SWAPPED:
                self.swapped.remove(answer)
                self.memory.forget(answer)
                self._moves[2].append(answer.number)
            case _:
                self.decoding.remove(answer)
        heapq.heappush(self._slots, answer.slot)
        in_place = answer.phase is not Phase.SWAPPED
        if in_place and (self.rules.answers or self.sizes.drafts) and len(answer.made) > 1:
            # the newest token has no K and V yet
            text = np.concatenate([answer.ids, np.asarray(answer.made[:-1], np.int32)])
            answer.keys, answer.read = self._keys(answer, text), len(text)
            self.memory.share(answer)
        self.memory.release(answer)
        answer.phase = Phase.ENDED

    def _admit(self) -> None:
        """Gives free slots and memory to waiting answers, the shortest first.

        None begins while another is swapped out.
        """
        while self.waiting and self._slots and not self.swapped:
            answer = self.waiting[0][2]
            if not self.memory.admit(answer, self.begun):
                return
            heapq.heappop(self.waiting)
            answer.slot, answer.phase = heapq.heappop(self._slots), Phase.READING
            self.reading.append(answer)

    def _swap_in(self) -> None:
        """Swaps answers in while memory has room, in the order in which they joined.

        Those that decode keep room to grow.
        """
        for answer in sorted(self.swapped, key=lambda answer: answer.joined):
            first = self.memory.num_groups(answer)
            groups = self.memory.swap_in(answer, self.sizes.growth * len(self.decoding))
            if not groups:
                return
            self._moves[0].append(Move(answer.number, answer.slot, list(groups), first))
            self.swapped.remove(answer)
            answer.phase = Phase.DECODING
            insort(self.decoding, answer, key=lambda answer: answer.joined)

    def _preempt_for(self, answer: Answer, planned: list[Answer]) -> bool:
        """Swaps out the last to have joined, so that an answer can grow; returns whether it did.

        Those that are `planned` stay, and those that joined before the answer. The answer itself
        is swapped out if it is the last, unless it is alone: prompts in prefill will join. No
        answer is while one has all its tokens planned: the next plan has its memory.
        """
        others = [answer for answer in self.decoding if answer not in planned]
        if not self.sizes.drafts and any(o.sent == o.max_tokens for o in others):
            return False
        later = [o for o in others if o.joined >= answer.joined]
        last = next((o for o in reversed(later) if self.memory.can_swap_out(o)), None)
        if last is None or len(self.decoding) == 1:
            return False
        groups = self.memory.swap_out(last, self.swapped)
        first = self.memory.num_groups(last)
        self._moves[1].append(Move(last.number, last.slot, groups, first))
        self.decoding.remove(last)
        self.swapped.append(last)
        last.phase = Phase.SWAPPED
        return True

    def _reading(self) -> Reading | None:
        """Plans a prefill program; answers whose prompts end decode from then on."""
        planned = self.prompts.read_on()
        if planned is None:
            return None
        reading, answers = planned
        if reading.last:
            ended = zip(reading.chunks, answers, strict=True)
            chunks = [chunk._replace(kept=self._begin_decoding(answer)) for chunk, answer in ended]
            reading = reading._replace(chunks=chunks)
        self._stall.read(reading.num_rows, reading.size, max(c.start for c in reading.chunks))
        return reading

    def _begin_decoding(self, answer: Answer) -> list[int]:
        """Moves an answer to decoding; returns the groups of its compressed prompt."""
        self.prompts.end(answer)
        self.decoding.append(answer)
        answer.phase, answer.sent, answer.joined = Phase.DECODING, 1, next(self._joins)
        return self.memory.compress(answer)

    def _decoding(self) -> Decoding | None:
        """Plans the next decode program, unless prefill comes first."""
        if following := self.prompts.candidates():
            size = self.prompts.next_chunk(following[0]).size
            if self._stall.allows_more(size, following[0].read):
                return None
        self._stall.decoded()
        wanting = [answer for answer in self.decoding if answer.sent < answer.max_tokens]
        if not wanting:
            return None
        rows, answers = [], []
        most = steps = 1 if self.sizes.drafts else self._steps()
        if self.sizes.drafts:
            most += self._latency.drafts(self._rows_for(len(wanting)))
        for answer in wanting:
            while answer.phase is Phase.DECODING and self.memory.lacks_pages(answer, self.begun):
                if not self._preempt_for(answer, answers):
                    break
            if answer.phase is Phase.SWAPPED:
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
        num_rows = self._rows_for(len(rows))
        if self.sizes.drafts:
            drafts, numbers = self.sizes.drafts_for(num_rows), [row.answer for row in rows]
            if most == 1 and self._latency.idles and self._can_run(num_rows, numbers, 0):
                drafts = 0
            return Decoding(num_rows, steps, rows, drafts=drafts)
        return Decoding(num_rows, steps, rows, self._prefixes(answers, num_rows))

    def _prefixes(self, answers: list[Answer], num_rows: int) -> list[SharedPrefix]:
        """Returns the prefixes that rows read together."""
        if not self.sizes.prefix_rows:
            return []
        found = shared_prefixes(answers, *self.sizes.prefixes(num_rows), self.sizes.block_tokens)
        numbers = [answer.number for answer in answers]
        return found if found and self._can_run(num_rows, numbers) else []

    def _steps(self) -> int:
        """Returns the number of steps of the next program.

        It is the maximum unless something waits for the program's end: a prompt in prefill, a row
        whose service is due, an answer that gets the slot or the memory of a finished row, or a
        client waiting for tokens. A new request waits for two programs.
        """
        if self.reading or not self.decoding:
            return 1
        some_wait = self.waiting or self.swapped
        steps = min(self.sizes.steps, BUSY_STEPS) if some_wait else self.sizes.steps
        left = [answer.max_tokens - answer.sent for answer in self.decoding]
        ends = [max(left)]
        if some_wait:
            ends += [steps for steps in left if steps > 0]
        for answer in self.decoding:
            ends += until_due(self.rules.periods, answer.sent - 1)
        return min(self._stall.most_steps(steps), *ends)
