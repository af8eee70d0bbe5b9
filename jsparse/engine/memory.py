"""Allocates page groups to sequences: prefix sharing, growth, admission and preemption."""

import itertools
from bisect import bisect
from collections import Counter
from collections.abc import Sequence

from jsparse.engine.blocks import BlockPool, CacheBlock
from jsparse.engine.sizes import EngineSizes, Rules
from jsparse.engine.step_plan import SequenceState


class Memory:
    """The allocator of page groups: a prompt's on admission, a sequence's as it grows.

    No sequence is ever preempted for good: one is admitted or grows only if every running sequence
    can still finish. If host memory can hold the blocks that do not fit on the device, all
    sequences can finish side by side, and a stalled one is preempted: its blocks, pinned, leave the
    device like those of finished requests. Otherwise sequences finish one at a time, and a stalled
    one keeps its groups. While one is preempted, none is admitted, so the first case remains.

    Attributes:
        pool: the groups, and the blocks of shared prefixes.
    """

    def __init__(self, sizes: EngineSizes, rules: Rules) -> None:
        """Creates an empty allocator."""
        self.sizes, self.rules = sizes, rules
        self.pool = BlockPool(sizes.num_groups, sizes.host_blocks)

    def require_room(self, prompt: int, max_tokens: int) -> None:
        """Raises ValueError if a prompt with `max_tokens` new tokens can never fit."""
        sizes, tokens = self.sizes, prompt + max_tokens
        if tokens > sizes.max_model_len:
            raise ValueError(
                f"prompt of {prompt} tokens + max_tokens={max_tokens} is {tokens}: must be at most "
                f"max_model_len={sizes.max_model_len}"
            )
        groups = max(self._first(prompt, max_tokens), self._needed(prompt, max_tokens))
        if groups > self.pool.size:
            takes = f"is {tokens}"
            if sizes.evicted_pages:
                takes = f"takes {groups * sizes.page_size} while the prompt is compressed"
            raise ValueError(
                f"prompt of {prompt} tokens + max_tokens={max_tokens} {takes}: must fit in the "
                f"{self.pool.size * sizes.page_size} tokens of the engine's KV cache"
            )

    def _needed(self, prompt: int, new: int) -> int:
        """Returns the number of groups of a sequence with `new` tokens after its prompt."""
        return self.sizes.groups_for(self.rules.slots(prompt, new))

    def _first(self, prompt: int, max_tokens: int) -> int:
        """Returns the number of groups that a sequence needs until it decodes.

        They hold its prompt and its first tokens; if the policy evicts, also the uncompressed
        prompt.
        """
        kept = self._needed(prompt, min(max_tokens, self.sizes.growth_tokens))
        return kept + self.sizes.groups_for(prompt) if self.sizes.evicted_pages else kept

    def admit(self, seq: SequenceState, begun: Sequence[SequenceState]) -> bool:
        """Allocates a sequence's prompt and first tokens; returns False if it must wait."""
        shared = self.pool.find(seq.keys[: self._shareable(seq)])
        first = self._first(len(seq.ids), seq.max_tokens)
        wanted = first - len(shared) * self.sizes.block_groups
        left = self.pool.available - self.pool.cost(shared) - wanted
        later = max(0, self._missing(seq) - (wanted if self.sizes.evicted_pages else first))
        claim = later, wanted, shared
        # a single sequence always fits, but idle blocks may occupy its prompt's groups
        can_finish = not begun or self._fit_with_host([*begun, seq])
        if left < 0 or not (can_finish or self._all_can_finish(begun, left, claim)):
            return False
        seq.host_tokens = sum(not block.groups for block in shared) * self.sizes.block_tokens
        self.pool.acquire(shared)
        seq.blocks = shared
        seq.private_groups = self.pool.allocate(wanted)
        if self.sizes.evicted_pages:
            cut = len(seq.private_groups) - first + self.sizes.groups_for(len(seq.ids))
            seq.private_groups, seq.kept_groups = (
                seq.private_groups[:cut],
                seq.private_groups[cut:],
            )
        seq.kv_tokens = seq.cached_tokens = len(shared) * self.sizes.block_tokens
        seq.prefilled = 0 if self.rules.replays else seq.kv_tokens
        return True

    def release(self, seq: SequenceState) -> None:
        """Frees the groups and blocks of a sequence."""
        self.pool.release(seq.blocks)
        self.pool.free([*seq.private_groups, *seq.kept_groups])
        seq.blocks, seq.private_groups, seq.kept_groups = [], [], []

    def compress(self, seq: SequenceState) -> list[int]:
        """Moves a sequence to the groups of its compressed prompt, and returns them.

        The groups of the uncompressed prompt are freed. Returns [] if the policy does not evict.
        """
        kept, seq.kept_groups = seq.kept_groups, []
        if kept:
            self.release(seq)
            seq.private_groups = kept
        return list(kept)

    def _shareable(self, seq: SequenceState, *, on_device: bool = False) -> int:
        """Returns the number of leading blocks of a prompt that are cached and may be shared."""
        sizes = self.sizes
        maximum = len(seq.ids) - max(1, self.rules.window)
        cached = 0 if seq.scored else self.pool.num_cached(seq.keys, on_device=on_device)
        known = cached * sizes.block_tokens
        return sizes.hit_end(max(0, min(maximum, known))) // sizes.block_tokens

    def take_over(self, seq: SequenceState) -> None:
        """Adopts cached blocks on the device that others have computed in the meantime.

        Resets the policy's state if the adopted tokens are not replayed to it.
        """
        blocks = self._shareable(seq, on_device=True)
        tokens = blocks * self.sizes.block_tokens
        if tokens <= seq.kv_tokens:
            return
        old = len(seq.blocks)
        groups = (blocks - old) * self.sizes.block_groups
        adopted = self.pool.find(seq.keys[old:blocks])
        self.pool.acquire(adopted)
        seq.blocks += adopted
        self.pool.free(seq.private_groups[:groups])
        seq.private_groups = seq.private_groups[groups:]
        seq.cached_tokens += tokens - seq.kv_tokens
        seq.kv_tokens = tokens
        if not self.rules.replays:
            seq.prefilled, seq.fresh = tokens, True

    def share(self, seq: SequenceState) -> None:
        """Moves completed blocks to the prefix cache, up to the first that is already cached."""
        for key in seq.keys[len(seq.blocks) : seq.prefilled // self.sizes.block_tokens]:
            if self.pool.num_cached([key]):
                return
            groups = seq.private_groups[: self.sizes.block_groups]
            seq.private_groups = seq.private_groups[self.sizes.block_groups :]
            seq.blocks.append(self.pool.share(key, groups))

    def steps_left(self, seq: SequenceState, steps: int) -> int:
        """Returns the number of steps, up to `steps`, that fit a sequence's groups.

        The newest token has no K and V yet, so each head holds one token fewer than the sequence.
        """
        prompt, made, groups = len(seq.ids), seq.planned - 1, self.num_groups(seq)
        if self._needed(prompt, made + steps) <= groups:
            return steps
        too_many = range(1, steps + 1)
        return bisect(too_many, False, key=lambda n: self._needed(prompt, made + n) > groups)

    def grow(self, seq: SequenceState, steps: int, begun: Sequence[SequenceState]) -> list[int]:
        """Allocates memory for `steps` more decode steps; returns the new groups.

        Returns [] if the sequence has enough, or must stall because another could no longer finish.
        """
        if self.steps_left(seq, steps) >= steps:
            return []
        count = min(self.sizes.growth, self._missing(seq), self.pool.available)
        if count == 0 or not self._may_grow(seq, count, begun):
            return []
        groups = self.pool.allocate(count)
        seq.private_groups += groups
        return groups

    def lacks_pages(self, seq: SequenceState, begun: Sequence[SequenceState]) -> bool:
        """Returns whether a sequence can continue only if another one is preempted.

        True if it lacks memory for a step, no group is free, and device and host memory together
        can hold all sequences.
        """
        short = self.pool.available == 0 and self.steps_left(seq, 1) == 0
        return short and self._fit_with_host(begun)

    def _fit_with_host(self, begun: Sequence[SequenceState]) -> bool:
        """Returns whether device and host memory together can hold these sequences until they end.

        Each counts with the most blocks that it can ever have, and places for one more row stay
        free. So when running sequences have all groups, the preempted ones leave places for the
        blocks of any row.
        """
        sizes = self.sizes
        room = sizes.host_blocks - sizes.blocks_for(sizes.row_groups)
        if room < 0:
            return False
        needs = (
            max(
                self._first(len(each.ids), each.max_tokens),
                self._needed(len(each.ids), each.max_tokens),
            )
            for each in begun
        )
        blocks = sum(map(sizes.blocks_for, needs)) - room
        return blocks * sizes.block_groups <= self.pool.size

    def _may_grow(self, seq: SequenceState, count: int, begun: Sequence[SequenceState]) -> bool:
        """Returns whether every sequence could still finish if this one had `count` more groups."""
        if self._fit_with_host(begun):
            return True
        seq.private_groups += [-1] * count
        may = self._all_can_finish(begun, self.pool.available - count)
        del seq.private_groups[len(seq.private_groups) - count :]
        return may

    def preempt(self, seq: SequenceState) -> None:
        """Releases the memory of a decoding sequence, and pins it until it resumes or ends.

        Its own groups become blocks that no other sequence finds.
        """
        for groups in itertools.batched(seq.private_groups, self.sizes.block_groups):
            seq.blocks.append(CacheBlock(b"", groups, references=1))
        seq.private_groups = []
        self.pool.pin(seq.blocks)
        self.pool.release(seq.blocks)

    def resume(self, seq: SequenceState, spare: int) -> bool:
        """Gives a preempted sequence its memory back, wherever its blocks are.

        Returns False if that would leave fewer than `spare` groups, or no room for the next token.
        """
        further = self._needed(len(seq.ids), seq.planned) - self.num_groups(seq)
        if self.pool.available < self.pool.cost(seq.blocks) + max(0, further) + spare:
            return False
        self.pool.acquire(seq.blocks)
        self.pool.unpin(seq.blocks)
        own = [block for block in seq.blocks if not block.key]
        seq.blocks = seq.blocks[: len(seq.blocks) - len(own)]
        seq.private_groups = self.pool.dissolve(own)
        return True

    def forget(self, seq: SequenceState) -> None:
        """Frees the memory of a preempted sequence that has ended."""
        self.pool.unpin(seq.blocks)
        seq.blocks = []

    def num_groups(self, seq: SequenceState) -> int:
        """Returns the number of groups allocated to a sequence."""
        shared = sum(block.size for block in seq.blocks)
        return shared + len(seq.private_groups) + len(seq.kept_groups)

    def _missing(self, seq: SequenceState) -> int:
        """Returns the number of groups that a sequence still needs for all its tokens.

        If the policy evicts, the sequence's blocks do not count: they are freed before it decodes.
        """
        needed = self._needed(len(seq.ids), seq.max_tokens)
        allocated = self.num_groups(seq)
        if self.sizes.evicted_pages:
            allocated -= len(seq.blocks) * self.sizes.block_groups
        return max(0, needed - allocated)

    def _all_can_finish(
        self,
        begun: Sequence[SequenceState],
        available: int,
        further: tuple[int, int, list[CacheBlock]] = (0, 0, []),
    ) -> bool:
        """Returns whether every running sequence can still finish, one at a time.

        This is the banker's algorithm (Dijkstra, EWD 108): the sequence that needs the fewest
        groups gets them, finishes, and frees its groups for the others. `available` groups are
        free. `further` describes a sequence that is about to start: the number of groups that it
        needs, the number that it has, and its blocks.
        """
        claims = [
            (
                self._missing(seq),
                len(seq.private_groups) + len(seq.kept_groups),
                seq.blocks,
            )
            for seq in begun
        ]
        claims.append(further)
        if sum(missing for missing, _, _ in claims) <= available:
            return True
        references = Counter(block for _, _, blocks in claims for block in blocks)
        for missing, private, blocks in sorted(claims, key=lambda claim: claim[0]):
            if missing > available:
                return False
            references.subtract(blocks)
            free = sum(block.size for block in blocks if not references[block])
            available += private + free
        return True
