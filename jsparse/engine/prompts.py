"""Plans the next prefill program: which chunks of which prompts."""

import heapq
from typing import NamedTuple

from jsparse.engine.memory import Memory
from jsparse.engine.sizes import MAX_PREFILLS, EngineSizes
from jsparse.engine.stall_budget import StallBudget
from jsparse.engine.step_plan import Chunk, PrefillPlan, SequenceState


class NextChunk(NamedTuple):
    """The next chunk of a prompt.

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
    """The sequences in prefill, and the planner of their chunks.

    Attributes:
        seqs: the sequences in prefill, in the order of admission.
    """

    def __init__(self, sizes: EngineSizes, memory: Memory, stall: StallBudget) -> None:
        """Creates an empty queue over this memory and stall budget."""
        self._sizes, self._memory, self._stall = sizes, memory, stall
        self.seqs: list[SequenceState] = []
        self._places = list(range(MAX_PREFILLS))

    def next_prefill(self) -> tuple[PrefillPlan, list[SequenceState]] | None:
        """Plans a chunk of the prompt with the fewest tokens left, less a credit for waiting.

        The program also gets chunks of other prompts that fit. Returns the plan and its sequences;
        None if no prompt is in prefill.
        """
        candidates = self.candidates()
        if not candidates:
            return None
        for seq in candidates[: max(self._sizes.prefill_rows)]:
            self._memory.take_over(seq)
        first = self.next_chunk(candidates[0])
        together = self._together(candidates, first)
        chunks = [self._plan_chunk(seq, first) for seq in together]
        num_rows = next(rows for rows in self._sizes.prefill_rows if rows >= len(chunks))
        return PrefillPlan(num_rows, first.size, first.last, first.replay, chunks), together

    def end(self, seq: SequenceState) -> None:
        """Removes a sequence whose prompt is finished or aborted."""
        self.seqs.remove(seq)
        if seq.place >= 0:
            heapq.heappush(self._places, seq.place)
            seq.place = -1

    def candidates(self) -> list[SequenceState]:
        """Returns the sequences whose prefill may continue now, by rank."""
        order = sorted(self.seqs, key=lambda seq: (seq.rank, seq.number))
        others = [seq for seq in order if seq.place < 0]
        allowed = set(others[: len(self._places)])
        return [seq for seq in order if seq.place >= 0 or seq in allowed]

    def _together(self, candidates: list[SequenceState], first: NextChunk) -> list[SequenceState]:
        """Returns the sequences whose chunks share a program with the first candidate's.

        A program for several prompts is used only if their tokens fill at least half of it, and
        none of them wants log-probabilities.
        """
        if candidates[0].scored:
            return candidates[:1]
        chosen, keys = [], set()
        for seq in candidates[: max(self._sizes.prefill_rows)]:
            chunk = self.next_chunk(seq)
            # of prompts with equal blocks, one computes them and the others adopt them
            alike = chunk[1:4] == first[1:4] and not seq.scored
            if alike and (chunk.key is None or chunk.key not in keys):
                chosen.append(seq)
                keys.add(chunk.key)
        if first.size <= self._sizes.packed_tokens and not first.replay:
            for rows in reversed(self._sizes.prefill_rows):
                part = chosen[:rows]
                tokens = sum(self.next_chunk(seq).valid for seq in part)
                half_full = 2 * tokens >= rows * first.size
                start = max(seq.prefilled for seq in part)
                if half_full and self._stall.allows(rows, first.size, start):
                    return part
        return candidates[:1]

    def next_chunk(self, seq: SequenceState) -> NextChunk:
        """Returns the next chunk of a prompt."""
        sizes, start, end = self._sizes, seq.prefilled, len(seq.ids)
        maximum = sizes.chunk_size(start)
        if start < seq.kv_tokens:
            return NextChunk(min(maximum, seq.kv_tokens - start), maximum, False, True, None)
        if not sizes.batch_invariant:
            allowed = [size for size in sizes.full_sizes if size <= maximum]
            fast = (size for size in allowed if self._stall.allows(1, size, start))
            maximum = next(fast, allowed[-1])
        valid, size = sizes.next_chunk(start, end, maximum)
        block = start // sizes.block_tokens
        completes = (block + 1) * sizes.block_tokens <= start + valid and block < len(seq.keys)
        key = seq.keys[block] if completes else None
        return NextChunk(valid, size, start + valid == end, False, key)

    def _plan_chunk(self, seq: SequenceState, like: NextChunk) -> Chunk:
        """Plans the next chunk of a prompt, in a program for chunks `like` it."""
        if seq.place < 0:
            seq.place = heapq.heappop(self._places)
        start, valid = seq.prefilled, self.next_chunk(seq).valid
        chunk = Chunk(
            seq=seq.number,
            slot=seq.slot,
            place=seq.place,
            fresh=seq.fresh,
            start=start,
            valid=valid,
            groups=list(seq.groups),
        )
        seq.prefilled, seq.fresh = start + valid, False
        if not like.replay:
            seq.kv_tokens = seq.prefilled
            if valid == self._sizes.chunk_size(start) or not self._sizes.batch_invariant:
                self._memory.share(seq)
        return chunk
