"""Says which groups of pages answers hold: what they share, what they get, and when they wait."""

import itertools
from bisect import bisect
from collections import Counter
from collections.abc import Sequence

from jsparse.engine.blocks import BlockPool, CacheBlock
from jsparse.engine.sizes import EngineSizes, Rules
from jsparse.engine.step_plan import Answer


class Memory:
    """Gives answers the memory of their prompts when they begin, and that of their tokens later.

    Answers begin and grow only as long as all that have begun can come to their ends, so that none
    is ever thrown out. Where host memory has room for what the device has not, that is all of them
    side by side, and who has to wait leaves its groups to others: its pages go to host memory and
    come back. Else they can end one by one, and who has to wait keeps its groups.

    Attributes:
        pool: the groups and the blocks that are shared.
        swapped: the groups whose pages host memory holds.
    """

    def __init__(self, sizes: EngineSizes, rules: Rules) -> None:
        """Prepares memory that nobody holds."""
        self.sizes, self.rules, self.pool = sizes, rules, BlockPool(sizes.num_groups)
        self.swapped = 0

    def require_room(self, prompt: int, max_tokens: int) -> None:
        """Raises ValueError unless a prompt and an answer of these sizes can be served at all."""
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
        """Returns the groups that an answer needs once it has so many tokens of its own."""
        return self.sizes.groups_for(self.rules.slots(prompt, new))

    def _first(self, prompt: int, max_tokens: int) -> int:
        """Returns the groups that an answer needs until it decodes.

        They are those of its prompt and of its first tokens; where the policy evicts, the prompt is
        there while it is compressed into others.
        """
        kept = self._needed(prompt, min(max_tokens, self.sizes.growth_tokens))
        return kept + self.sizes.groups_for(prompt) if self.sizes.evicted_pages else kept

    def admit(self, answer: Answer, begun: Sequence[Answer]) -> bool:
        """Gives an answer the memory of its prompt and of its first tokens, if it may begin."""
        shared = answer.keys[: self._shareable(answer)]
        first = self._first(len(answer.ids), answer.max_tokens)
        wanted = first - len(shared) * self._block_groups
        left = self.pool.available - self.pool.idle(shared) - wanted
        later = max(0, self._missing(answer) - (wanted if self.sizes.evicted_pages else first))
        claim = later, wanted, self.pool.find(shared)
        # one that is alone has room, but its prompt may be held by blocks alone
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
        """Takes back what an answer holds."""
        self.pool.drop(answer.blocks)
        self.pool.give_back([*answer.own, *answer.kept])
        answer.blocks, answer.own, answer.kept = [], [], []

    def compress(self, answer: Answer) -> list[int]:
        """Lets an answer go on in the groups that its prompt is compressed into, and returns them.

        Those that it was read into are free for whoever comes later. Where the policy does not
        evict, it goes on in these, and there are none.
        """
        kept, answer.kept = answer.kept, []
        if kept:
            self.release(answer)
            answer.own = kept
        return list(kept)

    def _shareable(self, answer: Answer) -> int:
        """Returns the number of leading blocks of a prompt that the pool has and it may use."""
        sizes = self.sizes
        maximum = len(answer.ids) - max(1, self.rules.window)
        known = self.pool.known(answer.keys) * sizes.block_tokens
        return sizes.hit_end(max(0, min(maximum, known))) // sizes.block_tokens

    def take_over(self, answer: Answer) -> None:
        """Uses the part of the prompt that others have read since.

        The state must begin anew where it has not seen the tokens in between and they are not
        replayed.
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

    def steps_left(self, answer: Answer, steps: int) -> int:
        """Returns the number of steps, up to `steps`, for which an answer that decodes has memory.

        A head holds one token less than the prompt and the answer have.
        """
        prompt, made, groups = len(answer.ids), answer.sent - 1, self.num_groups(answer)
        if self._needed(prompt, made + steps) <= groups:
            return steps
        too_many = range(1, steps + 1)
        return bisect(too_many, False, key=lambda n: self._needed(prompt, made + n) > groups)

    def grow(self, answer: Answer, steps: int, begun: Sequence[Answer]) -> list[int]:
        """Gives an answer that decodes the memory for so many steps; returns the new groups.

        There are none if it has enough, or if another might not come to its end then: an answer
        waits until others have ended, and then goes on.
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
        """Returns whether an answer waits for others to leave the device, and not for their ends.

        It has no memory for a step, and there is none.
        """
        short = self.pool.available == 0 and self.steps_left(answer, 1) == 0
        return short and self._fit_with_host(begun)

    def _fit_with_host(self, begun: Sequence[Answer]) -> bool:
        """Returns whether device and host memory together have room for all that these will need.

        Two of the largest answers are left over, since answers move as wholes: then either one that
        waits can leave the device, or what is there leaves room for another to come to its end.
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
        """Returns the groups of host memory that so many take: they are moved by parts."""
        part = self.sizes.moved_groups
        return -(-groups // part) * part

    def _may_grow(self, answer: Answer, count: int, begun: Sequence[Answer]) -> bool:
        """Returns whether all could come to their ends if an answer had so many groups more."""
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
        """Takes back the groups of an answer, and returns them: their pages go to host memory.

        It keeps blocks that others use, too, as long as those of all that are `swapped` leave room
        for the largest answer: whoever is left can come to its end.
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
        """Gives a swapped answer groups for its pages, and returns them.

        There are none if it would leave fewer than `spare`, or no page for its next token.
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
        """Returns the groups that an answer has yet to get if it gets all its tokens.

        Where the policy evicts, blocks are of no use to it: it leaves them before it decodes.
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
        """Returns whether all answers that have begun can come to their ends, one by one.

        That is the banker's algorithm (Dijkstra, EWD 108): whoever needs least gets it, ends and
        leaves what it has to the others. `available` groups are there; a further answer needs,
        has, and shares these groups and blocks.
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
