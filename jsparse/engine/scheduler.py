"""Plans the next prefill and decode programs, and allocates their memory.

It uses neither jax nor a clock, so that tests can simulate many events. A plan consists of plain
numbers: the same plans give the same bits again.
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
    DecodePlan,
    Phase,
    PrefillPlan,
    Resumed,
    RowPlan,
    SequenceState,
    SharedPrefix,
    StepPlan,
)
from jsparse.runtime.draft_length import MOST_STEPS, Remaining
from jsparse.runtime.pauses import until_due

# The most steps of a program while requests wait: a sequence that finishes early keeps its slot
# until its program and the next one have finished.
BUSY_STEPS = 8


class Scheduler:
    """The queues of unfinished sequences, by phase, and the planner of their programs."""

    def __init__(
        self,
        sizes: EngineSizes,
        rules: Rules,
        latency: Estimates,
        rows_for: Callable[..., int] | None = None,
        can_run: Callable[..., bool] = lambda rows, seqs, drafts=None: True,
    ) -> None:
        """Creates a scheduler without requests.

        Args:
            sizes: the static sizes.
            rules: the policy's traits.
            latency: estimates of program times.
            rows_for: returns the size of the smallest compiled program for at least n rows; None:
                all programs count as compiled.
            can_run: returns whether an optional program of `rows` rows for these sequence numbers
                is compiled: a program for shared prefixes, or a verification round with room for
                `drafts` drafts.
        """
        self.sizes, self.rules, self._latency = sizes, rules, latency
        self._rows_for = rows_for or sizes.rows_for
        self._can_run = can_run
        self.memory = Memory(sizes, rules)
        self.pool = self.memory.pool
        self.waiting: list[tuple[tuple[int, float], int, SequenceState]] = []
        self.decoding: list[SequenceState] = []
        self.preempted: list[SequenceState] = []
        self._stall = StallBudget(sizes, latency, self._rows_for, self.decoding)
        self.prompts = Prompts(sizes, self.memory, self._stall)
        self._joins = itertools.count()
        self._slots = list(range(sizes.num_slots))
        self._some_stopped = False

    @property
    def prefilling(self) -> list[SequenceState]:
        """The sequences in prefill."""
        return self.prompts.seqs

    @property
    def idle(self) -> bool:
        """Whether there is no sequence to work on."""
        return not (self.waiting or self.begun)

    @property
    def begun(self) -> list[SequenceState]:
        """The sequences with a slot."""
        return [*self.prefilling, *self.decoding, *self.preempted]

    @property
    def stepwise(self) -> bool:
        """Whether a decoding sequence needs each token's result before the next."""
        return any(seq.stepwise for seq in self.decoding)

    def add(self, seq: SequenceState) -> None:
        """Queues a sequence.

        Raises:
            ValueError: it could never fit.
        """
        self.memory.require_room(len(seq.ids), seq.max_tokens)
        seq.keys = self._keys(seq, seq.ids)
        heapq.heappush(self.waiting, (seq.rank, seq.number, seq))

    def record_tokens(self, seq: SequenceState, planned: int, tokens: int) -> None:
        """Replaces a sequence's planned number of tokens by the actual one."""
        seq.planned -= planned - tokens
        seq.known += tokens

    def _keys(self, seq: SequenceState, ids: np.ndarray) -> list[bytes]:
        """Returns the keys of the blocks of `ids` that a sequence may share."""
        if self.rules.root is None:
            return []
        return block_keys(ids, self.sizes.block_tokens, f"{self.rules.root}\n{seq.cache_salt}")

    def stop(self, seq: SequenceState, made: Sequence[int] = ()) -> None:
        """Stops a sequence in any phase; the next plan removes it.

        If given, its tokens `made` can be shared like its prompt.
        """
        seq.stopped = self._some_stopped = True
        seq.generated = made

    def plan(self) -> StepPlan:
        """Returns the next programs, and advances the state as if they had run."""
        self._release_finished()
        resumed = self._resume()
        self._admit()
        prefill, copies = self._prefill(), self.pool.take_copies()
        before = {seq.number for seq in self.preempted}
        decode = self._decode()
        preempted = [seq.number for seq in self.preempted if seq.number not in before]
        return StepPlan(prefill, decode, copies, resumed, self.pool.take_copies(), preempted)

    def _release_finished(self) -> None:
        """Frees the memory of sequences that have stopped or whose tokens are all planned."""
        if self._some_stopped:
            self._some_stopped = False
            for _, _, seq in self.waiting:
                if seq.stopped:
                    seq.phase = Phase.ENDED
            self.waiting = [entry for entry in self.waiting if not entry[2].stopped]
            heapq.heapify(self.waiting)
        for seq in self.begun:
            # a round's token count is known only when its results arrive
            if seq.stopped or (seq.planned == seq.max_tokens and not self.sizes.drafts):
                self._end(seq)

    def _end(self, seq: SequenceState) -> None:
        match seq.phase:
            case Phase.PREFILL:
                self.prompts.end(seq)
            case Phase.PREEMPTED:
                self.preempted.remove(seq)
                self.memory.forget(seq)
            case _:
                self.decoding.remove(seq)
        heapq.heappush(self._slots, seq.slot)
        in_place = seq.phase is not Phase.PREEMPTED
        if in_place and self.rules.shares_generated and len(seq.generated) > 1:
            # the newest token has no K and V yet
            text = np.concatenate([seq.ids, np.asarray(seq.generated[:-1], np.int32)])
            seq.keys, seq.prefilled = self._keys(seq, text), len(text)
            self.memory.share(seq)
        self.memory.release(seq)
        seq.phase = Phase.ENDED

    def _admit(self) -> None:
        """Gives free slots and memory to waiting sequences, by rank.

        No sequence is admitted while another is preempted.
        """
        while self.waiting and self._slots and not self.preempted:
            seq = self.waiting[0][2]
            if not self.memory.admit(seq, self.begun):
                return
            heapq.heappop(self.waiting)
            seq.slot, seq.phase = heapq.heappop(self._slots), Phase.PREFILL
            self.prefilling.append(seq)

    def _resume(self) -> list[Resumed]:
        """Resumes preempted sequences while memory has room, in the order of joining.

        Decoding sequences keep room to grow.
        """
        resumed = []
        for seq in sorted(self.preempted, key=lambda seq: seq.joined):
            if not self.memory.resume(seq, self.sizes.growth * len(self.decoding)):
                break
            resumed.append(Resumed(seq.number, seq.slot, seq.groups))
            self.preempted.remove(seq)
            seq.phase = Phase.DECODING
            insort(self.decoding, seq, key=lambda seq: seq.joined)
        return resumed

    def _preempt_for(self, seq: SequenceState, planned: list[SequenceState]) -> bool:
        """Preempts the sequence that joined last so that `seq` can grow; returns whether it did.

        Sequences in `planned` stay, as do those that joined before `seq`. If `seq` itself joined
        last, it is preempted, unless it decodes alone: prompts in prefill will join. None is
        preempted while another sequence has all its tokens planned, since the next plan frees its
        memory.
        """
        others = [seq for seq in self.decoding if seq not in planned]
        if not self.sizes.drafts and any(o.planned == o.max_tokens for o in others):
            return False
        if len(self.decoding) == 1:
            return False
        last = others[-1]  # `seq` or one that joined later
        self.memory.preempt(last)
        self.decoding.remove(last)
        self.preempted.append(last)
        last.phase = Phase.PREEMPTED
        return True

    def _prefill(self) -> PrefillPlan | None:
        """Plans a prefill program, and moves sequences whose prompts end in it to decoding."""
        planned = self.prompts.next_prefill()
        if planned is None:
            return None
        prefill, seqs = planned
        if prefill.last:
            ended = zip(prefill.chunks, seqs, strict=True)
            chunks = [chunk._replace(kept=self._start_decoding(seq)) for chunk, seq in ended]
            prefill = prefill._replace(chunks=chunks)
        self._stall.add_prefill(
            prefill.num_rows, prefill.size, max(c.start for c in prefill.chunks)
        )
        return prefill

    def _start_decoding(self, seq: SequenceState) -> list[int]:
        """Moves a sequence to decoding; returns the groups of its compressed prompt."""
        self.prompts.end(seq)
        self.decoding.append(seq)
        seq.phase, seq.planned, seq.joined = Phase.DECODING, 1, next(self._joins)
        return self.memory.compress(seq)

    def _decode(self) -> DecodePlan | None:
        """Plans the next decode program, unless prefill comes first."""
        if following := self.prompts.candidates():
            size = self.prompts.next_chunk(following[0]).size
            if self._stall.allows_more(size, following[0].prefilled):
                return None
        self._stall.reset()
        wanting = [
            seq
            for seq in self.decoding
            if seq.planned < seq.max_tokens and not (seq.stepwise and seq.known < seq.planned)
        ]
        if not wanting:
            return None
        rows, seqs, num_rows = [], [], self._rows_for(len(wanting))
        steps, drafts, room = self._program(wanting, num_rows)
        for seq in wanting:
            while seq.phase is Phase.DECODING and self.memory.lacks_pages(seq, self.begun):
                if not self._preempt_for(seq, seqs):
                    break
            if seq.phase is Phase.PREEMPTED:
                continue
            count = min(1 if seq.stepwise else steps + drafts, seq.max_tokens - seq.planned)
            first = self.memory.num_groups(seq)
            groups = self.memory.grow(seq, count, self.begun)
            count = self.memory.steps_left(seq, count)
            if count > 0:
                seq.planned += count
                row = (seq.number, seq.slot, count, seq.planned - 1)
                rows.append(RowPlan(*row, groups=groups, first=first))
                seqs.append(seq)
        if not rows:
            return None
        if room is not None:
            return DecodePlan(num_rows, steps, rows, drafts=room)
        num_rows = self._rows_for(len(rows))
        return DecodePlan(num_rows, steps, rows, self._prefixes(seqs, num_rows))

    def _program(self, seqs: list[SequenceState], num_rows: int) -> tuple[int, int, int | None]:
        """Returns the steps and drafts of the next program, and the drafts that it has room for.

        A verification round is one step. Room for 0 drafts: several rounds without drafts; None:
        decode steps.
        """
        if not self.sizes.drafts:
            return self._steps(), 0, None
        # its compilation starts where programs run several steps, or if rows often draft nothing
        wanted = self.sizes.adapts and (self._latency.idles or self.sizes.steps > 1)
        apart = wanted and self._can_run(num_rows, [seq.number for seq in seqs], 0)
        drafts = self._latency.drafts(num_rows, self._remaining(seqs), steps=apart)
        if apart and drafts == 0:
            return min(self._steps(), MOST_STEPS), 0, 0
        return 1, drafts, self.sizes.drafts_for(num_rows)

    def _remaining(self, seqs: list[SequenceState]) -> list[Remaining]:
        """Returns what sequences still want; [] if others wait to replace those that end."""
        if self.waiting or self.prefilling or self.preempted:
            return []
        return [Remaining(seq.max_tokens - seq.planned, seq.acceptance) for seq in seqs]

    def _prefixes(self, seqs: list[SequenceState], num_rows: int) -> list[SharedPrefix]:
        """Returns the prefixes that rows read together."""
        if not self.sizes.prefix_rows:
            return []
        found = shared_prefixes(seqs, *self.sizes.prefixes(num_rows), self.sizes.block_tokens)
        numbers = [seq.number for seq in seqs]
        return found if found and self._can_run(num_rows, numbers) else []

    def _steps(self) -> int:
        """Returns the number of steps of the next program.

        It is the maximum unless something waits for the program's end: a prompt in prefill, a row
        whose service is due or whose next token depends on this one, a sequence that gets the slot
        or the memory of a finished row, or a client waiting for tokens. A new request waits for two
        programs.
        """
        if self.prefilling or not self.decoding or self.stepwise:
            return 1
        some_wait = self.waiting or self.preempted
        steps = min(self.sizes.steps, BUSY_STEPS) if some_wait else self.sizes.steps
        left = [seq.max_tokens - seq.planned for seq in self.decoding]
        ends = [max(left)]
        if some_wait:
            ends += [steps for steps in left if steps > 0]
        for seq in self.decoding if not self.sizes.drafts else ():  # rounds include their services
            ends += until_due(self.rules.periods, seq.planned - 1)
        return min(self._stall.most_steps(steps), *ends)
