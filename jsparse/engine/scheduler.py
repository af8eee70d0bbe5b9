"""Plans the next prompt chunk and decode batch, and allocates their memory.

It uses neither jax nor a clock, so that it can be tested by many simulated events.
A plan is plain numbers: a log of plans replays a session (jsparse.engine.plan_log).
"""

import heapq

from jsparse.engine.blocks import BlockPool, block_keys
from jsparse.engine.sizes import EngineSizes, Rules
from jsparse.engine.step_plan import Answer, Chunk, Decode, Phase, StepPlan
from jsparse.runtime.pauses import next_steps, until_due

# prompts that may be partly read at a time; each has state of its own on the device
MAX_READING = 4


class Scheduler:
    """Holds all unfinished answers by phase, the waiting ones in a heap, and plans their work."""

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
        """Stops an answer in any phase; the next plan drops it."""
        answer.stopped = self._some_stopped = True

    def plan(self) -> StepPlan:
        """Returns the next work, as if it were done at once: plans run in their order."""
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
        """Frees the memory of answers that were stopped or have all their tokens planned.

        Returns the numbers of the answers whose prompts were being read.
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
        """Gives free slots and memory to waiting answers, the shortest first.

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
        """Plans the next chunk, of the prompt with the least left to read; waiting counts, too."""
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
            answer=answer.number,
            slot=answer.slot,
            fresh=fresh,
            replay=replay,
            start=start,
            valid=valid,
            size=size,
            last=last,
            groups=list(answer.groups),
        )

    def _shareable(self, answer: Answer) -> int:
        """Returns the number of leading blocks of a prompt that the pool has and it may use."""
        sizes = self.sizes
        maximum = len(answer.ids) - max(1, self.rules.window)
        known = self.pool.known(answer.keys) * sizes.block_tokens
        return sizes.chunk_start(max(0, min(maximum, known))) // sizes.block_tokens

    def _take_over(self, answer: Answer) -> bool:
        """Uses the part of the prompt that others have read since.

        Returns whether the state must begin anew, because it has not seen the tokens in between
        and they are not replayed.
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
        """Shares the whole blocks that have been read, unless others have them already."""
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

        It is the maximum unless something waits for the program's end: a prompt that is being read,
        a row that is due for service before, or an answer that gets the slot or the memory of a row
        that ends.
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
