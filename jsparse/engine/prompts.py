"""Plans the next prefill program: which chunks of which prompts."""

import heapq
from typing import NamedTuple

from jsparse.engine.memory import Memory
from jsparse.engine.sizes import MAX_READING, EngineSizes
from jsparse.engine.stall_budget import StallBudget
from jsparse.engine.step_plan import Answer, Chunk, Reading


class NextChunk(NamedTuple):
    """Describes the next chunk of a prompt.

    Attributes:
        valid, size: the number of its tokens, and the size that they are padded to.
        last: whether the prompt ends with it.
        replay: whether its K and V are cached, and only the policy's state is built.
        key: the key of the first block that it completes; None: it completes none.
    """

    valid: int
    size: int
    last: bool
    replay: bool
    key: bytes | None


class Prompts:
    """Holds the answers in prefill, and plans their next chunks.

    Attributes:
        answers: the answers in prefill, in the order of admission.
    """

    def __init__(self, sizes: EngineSizes, memory: Memory, stall: StallBudget) -> None:
        """Creates an empty queue over this memory and stall budget."""
        self._sizes, self._memory, self._stall = sizes, memory, stall
        self.answers: list[Answer] = []
        self._places = list(range(MAX_READING))

    def read_on(self) -> tuple[Reading, list[Answer]] | None:
        """Plans a chunk of the prompt with the fewest tokens left, less a credit for waiting.

        The program also takes chunks of other prompts that fit into it. Returns the plan and its
        answers; None if no prompt is in prefill.
        """
        candidates = self.candidates()
        if not candidates:
            return None
        for answer in candidates[: max(self._sizes.prefill_rows)]:
            self._memory.take_over(answer)
        first = self.next_chunk(candidates[0])
        together = self._together(candidates, first)
        chunks = [self._read(answer, first) for answer in together]
        num_rows = next(rows for rows in self._sizes.prefill_rows if rows >= len(chunks))
        return Reading(num_rows, first.size, first.last, first.replay, chunks), together

    def end(self, answer: Answer) -> None:
        """Removes an answer whose prompt is finished or aborted."""
        self.answers.remove(answer)
        if answer.place >= 0:
            heapq.heappush(self._places, answer.place)
            answer.place = -1

    def candidates(self) -> list[Answer]:
        """Returns the answers whose prompts may go on now, in their order."""
        order = sorted(self.answers, key=lambda answer: (answer.rank, answer.number))
        others = [answer for answer in order if answer.place < 0]
        allowed = set(others[: len(self._places)])
        return [answer for answer in order if answer.place >= 0 or answer in allowed]

    def _together(self, candidates: list[Answer], first: NextChunk) -> list[Answer]:
        """Returns the answers whose chunks share a program with the first candidate's.

        A program for several prompts is used only if their tokens fill at least half of it.
        """
        chosen, keys = [], set()
        for answer in candidates[: max(self._sizes.prefill_rows)]:
            chunk = self.next_chunk(answer)
            # prompts with equal blocks: one computes them, the others take them over
            if chunk[1:4] == first[1:4] and (chunk.key is None or chunk.key not in keys):
                chosen.append(answer)
                keys.add(chunk.key)
        if first.size <= self._sizes.packed_tokens and not first.replay:
            for rows in reversed(self._sizes.prefill_rows):
                part = chosen[:rows]
                tokens = sum(self.next_chunk(answer).valid for answer in part)
                half_full = 2 * tokens >= rows * first.size
                start = max(answer.read for answer in part)
                if half_full and self._stall.allows(rows, first.size, start):
                    return part
        return candidates[:1]

    def next_chunk(self, answer: Answer) -> NextChunk:
        """Returns the next chunk of a prompt."""
        sizes, start, end = self._sizes, answer.read, len(answer.ids)
        maximum = sizes.chunk_size(start)
        if start < answer.known:
            return NextChunk(min(maximum, answer.known - start), maximum, False, True, None)
        if not sizes.batch_invariant:
            allowed = [size for size in sizes.full_sizes if size <= maximum]
            fast = (size for size in allowed if self._stall.allows(1, size, start))
            maximum = next(fast, allowed[-1])
        valid, size = sizes.next_chunk(start, end, maximum)
        block = start // sizes.block_tokens
        completes = (block + 1) * sizes.block_tokens <= start + valid and block < len(answer.keys)
        key = answer.keys[block] if completes else None
        return NextChunk(valid, size, start + valid == end, False, key)

    def _read(self, answer: Answer, like: NextChunk) -> Chunk:
        """Plans the next chunk of a prompt, in a program for chunks `like` it."""
        if answer.place < 0:
            answer.place = heapq.heappop(self._places)
        start, valid = answer.read, self.next_chunk(answer).valid
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
            if valid == self._sizes.chunk_size(start) or not self._sizes.batch_invariant:
                self._memory.share(answer)
        return chunk
