"""Allocates page groups to answers: prefix sharing, growth, admission and swapping."""

import itertools
from bisect import bisect
from collections import Counter
from collections.abc import Sequence

from jsparse.engine.blocks import BlockPool, CacheBlock
from jsparse.engine.sizes import EngineSizes, Rules
from jsparse.engine.step_plan import Answer


class Memory:
    """Allocates the groups of an answer's prompt on admission, and those of its tokens later.

    An answer begins or grows only if every running answer can still finish, so that none is ever
    preempted for good. If host memory can hold the pages that do not fit on the device, all of them
    can finish side by side, and a stalled answer is swapped out. Otherwise they finish one at a
    time, and a stalled answer keeps its groups.

    Attributes:
        pool: the groups, and the blocks of shared prefixes.
        swapped: the number of groups in host memory.
    """

    def __init__(self, sizes: EngineSizes, rules: Rules) -> None:
        """Creates an empty allocator."""
        self.sizes, self.rules, self.pool = sizes, rules, BlockPool(sizes.num_groups)
        self.swapped = 0

    def require_room(self, prompt: int, max_tokens: int) -> None:
        """Raises ValueError unless a prompt and an answer of these sizes can ever fit."""
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
                f"{self.pool.size * sizes.page_size} tokens of K and V that the engine holds"
            )

    def _needed(self, prompt: int, new: int) -> int:
        """Returns the groups of an answer with `new` tokens after its prompt."""
        return self.sizes.groups_for(self.rules.slots(prompt, new))

    def _first(self, prompt: int, max_tokens: int) -> int:
        """Returns the groups that an answer needs until it decodes.

        They are those of its prompt and of its first tokens; if the policy evicts, also those of
        the uncompressed prompt.
        """
        kept = self._needed(prompt, min(max_tokens, self.sizes.growth_tokens))
        return kept + self.sizes.groups_for(prompt) if self.sizes.evicted_pages else kept

    def admit(self, answer: Answer, begun: Sequence[Answer]) -> bool:
        """Allocates an answer's prompt and first tokens; returns False if it must wait."""
        shared = answer.keys[: self._shareable(answer)]
        first = self._first(len(answer.ids), answer.max_tokens)
        wanted = first - len(shared) * self._block_groups
        left = self.pool.available - self.pool.idle(shared) - wanted
        later = max(0, self._missing(answer) - (wanted if self.sizes.evicted_pages else first))
        claim = later, wanted, self.pool.find(shared)
        # a single answer always fits, but idle blocks may hold its prompt's groups
        can_end = not begun or self._fit_with_host([*begun, answer])
        if left < 0 or not (can_end or self._all_can_end(begun, left, claim)):
            return False
        answer.blocks = self.pool.hold(shared)
        answer.own = self.pool.take(wanted)
        if self.sizes.evicted_pages:
            cut = len(answer.own) - first + self.sizes.groups_for(len(answer.ids))
            answer.own, answer.kept = answer.own[:cut], answer.own[cut:]
        answer.known = answer.cached = len(shared) * self.sizes.block_tokens
        answer.read = 0 if self.rules.replays else answer.known
        return True

    def release(self, answer: Answer) -> None:
        """Frees the groups and blocks of an answer."""
        self.pool.drop(answer.blocks)
        self.pool.give_back([*answer.own, *answer.kept])
        answer.blocks, answer.own, answer.kept = [], [], []

    def compress(self, answer: Answer) -> list[int]:
        """Moves an answer to the groups of its compressed prompt, and returns them.

        The groups of the uncompressed prompt are freed. Returns [] if the policy does not evict.
        """
        kept, answer.kept = answer.kept, []
        if kept:
            self.release(answer)
            answer.own = kept
        return list(kept)

    def _shareable(self, answer: Answer) -> int:
        """Returns the number of leading blocks of a prompt that are cached and may be shared."""
        sizes = self.sizes
        maximum = len(answer.ids) - max(1, self.rules.window)
        known = self.pool.known(answer.keys) * sizes.block_tokens
        return sizes.hit_end(max(0, min(maximum, known))) // sizes.block_tokens

    def take_over(self, answer: Answer) -> None:
        """Takes over cached blocks that others have computed since.

        The policy's state must begin anew if the tokens in between are not replayed to it.
        """
        blocks = self._shareable(answer)
        tokens = blocks * self.sizes.block_tokens
        if tokens <= answer.known:
            return
        held = len(answer.blocks)
        groups = (blocks - held) * self._block_groups
        answer.blocks += self.pool.hold(answer.keys[held:blocks])
        self.pool.give_back(answer.own[:groups])
        answer.own = answer.own[groups:]
        answer.cached += tokens - answer.known
        answer.known = tokens
        if not self.rules.replays:
            answer.read, answer.fresh = tokens, True

    def share(self, answer: Answer) -> None:
        """Adds the whole blocks that were computed to the prefix cache, unless they are in it."""
        for key in answer.keys[len(answer.blocks) : answer.read // self.sizes.block_tokens]:
            if self.pool.known([key]):
                return
            groups = answer.own[: self._block_groups]
            answer.own = answer.own[self._block_groups :]
            answer.blocks.append(self.pool.share(key, groups))

    @property
    def _block_groups(self) -> int:
        return self.sizes.block_tokens // self.sizes.page_size

    def steps_left(self, answer: Answer, steps: int) -> int:
        """Returns the number of steps, up to `steps`, that fit an answer's groups.

        A head holds one token less than the prompt and the answer have.
        """
        prompt, made, groups = len(answer.ids), answer.sent - 1, self.num_groups(answer)
        if self._needed(prompt, made + steps) <= groups:
            return steps
        too_many = range(1, steps + 1)
        return bisect(too_many, False, key=lambda n: self._needed(prompt, made + n) > groups)

    def grow(self, answer: Answer, steps: int, begun: Sequence[Answer]) -> list[int]:
        """Allocates the memory of `steps` further decode steps; returns the new groups.

        Returns [] if the answer has enough, or if another could then not finish: the answer stalls
        until others finish.
        """
        if self.steps_left(answer, steps) >= steps:
            return []
        count = min(self.sizes.growth, self._missing(answer), self.pool.available)
        if count == 0 or not self._may_grow(answer, count, begun):
            return []
        groups = self.pool.take(count)
        answer.own += groups
        return groups

    def lacks_pages(self, answer: Answer, begun: Sequence[Answer]) -> bool:
        """Returns whether an answer needs another one to be swapped out, rather than to finish.

        It has no memory for a step, and none is free.
        """
        short = self.pool.available == 0 and self.steps_left(answer, 1) == 0
        return short and self._fit_with_host(begun)

    def _fit_with_host(self, begun: Sequence[Answer]) -> bool:
        """Returns whether device and host memory together hold all that these answers will need.

        Room for two of the largest answers is kept free, since an answer moves as a whole: then
        either a stalled one can be swapped out, or another one can finish.
        """
        sizes = self.sizes
        room = sizes.host_groups - 2 * self._on_host(sizes.row_groups)
        if room < 0:
            return False
        needs = (
            max(
                self._first(len(own.ids), own.max_tokens),
                self._needed(len(own.ids), own.max_tokens),
            )
            for own in begun
        )
        return sum(map(self._on_host, needs)) <= self.pool.size + room

    def _on_host(self, groups: int) -> int:
        """Returns the groups of host memory that `groups` take, which move in parts."""
        part = self.sizes.moved_groups
        return -(-groups // part) * part

    def _may_grow(self, answer: Answer, count: int, begun: Sequence[Answer]) -> bool:
        """Returns whether every answer could still finish if one had `count` groups more."""
        if self._fit_with_host(begun):
            return True
        answer.own += [-1] * count
        may = self._all_can_end(begun, self.pool.available - count)
        del answer.own[len(answer.own) - count :]
        return may

    def can_swap_out(self, answer: Answer) -> bool:
        """Returns whether host memory has room for an answer's pages."""
        return self.swapped + self._on_host(self.num_groups(answer)) <= self.sizes.host_groups

    def swap_out(self, answer: Answer, swapped: Sequence[Answer]) -> list[int]:
        """Frees the groups of an answer whose pages go to host memory, and returns them.

        The answer keeps blocks that others share, as long as the blocks of all `swapped` answers
        leave room for the largest answer, so that the others can finish.
        """
        stay = [*itertools.takewhile(lambda block: block.holders > 1, answer.blocks)]
        staying = {*stay, *(block for other in swapped for block in other.blocks)}
        if len(staying) * self._block_groups + self.sizes.row_groups > self.pool.size:
            stay = []
        groups = answer.groups[len(stay) * self._block_groups :]
        self.pool.drop(answer.blocks[len(stay) :])
        self.pool.give_back(answer.own)
        answer.blocks, answer.own, answer.swapped = stay, [], len(groups)
        self.swapped += self._on_host(answer.swapped)
        return groups

    def swap_in(self, answer: Answer, spare: int) -> list[int]:
        """Allocates groups for the pages of a swapped answer, and returns them.

        Returns [] if fewer than `spare` would be left, or no page for its next token.
        """
        needed = self._needed(len(answer.ids), answer.sent) - self.num_groups(answer)
        if self.pool.available < max(answer.swapped, needed) + spare:
            return []
        answer.own = self.pool.take(answer.swapped)
        self.forget(answer)
        return answer.own

    def forget(self, answer: Answer) -> None:
        """Frees the host memory of an answer."""
        self.swapped -= self._on_host(answer.swapped)
        answer.swapped = 0

    def num_groups(self, answer: Answer) -> int:
        """Returns the number of groups that an answer holds."""
        return len(answer.blocks) * self._block_groups + len(answer.own) + len(answer.kept)

    def _missing(self, answer: Answer) -> int:
        """Returns the groups that an answer still needs for all its tokens.

        If the policy evicts, its blocks do not count: it leaves them before it decodes.
        """
        needed = self._needed(len(answer.ids), answer.max_tokens)
        held = self.num_groups(answer)
        if self.sizes.evicted_pages:
            held -= len(answer.blocks) * self._block_groups
        return max(0, needed - held)

    def _all_can_end(
        self,
        begun: Sequence[Answer],
        available: int,
        further: tuple[int, int, list[CacheBlock]] = (0, 0, []),
    ) -> bool:
        """Returns whether every running answer can still finish, one at a time.

        This is the banker's algorithm (Dijkstra, EWD 108): the answer that needs least gets it,
        finishes and frees its groups for the others. `available` groups are free; `further` is an
        answer about to begin: the groups that it needs, those that it has, and its blocks.
        """
        claims = [
            (self._missing(answer), len(answer.own) + len(answer.kept), answer.blocks)
            for answer in begun
        ]
        claims.append(further)
        if sum(missing for missing, _, _ in claims) <= available:
            return True
        holders = Counter(block for _, _, blocks in claims for block in blocks)
        for missing, own, blocks in sorted(claims, key=lambda claim: claim[0]):
            if missing > available:
                return False
            holders.subtract(blocks)
            free = sum(len(block.groups) for block in blocks if not holders[block])
            available += own + free
        return True
