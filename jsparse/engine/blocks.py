"""Allocates page groups, and caches blocks of them for requests with equal prefixes.

A *page group*, or group, is one page for every layer and KV head. A *block* is a run of groups
whose tokens filled whole prefill chunks, so that another request with the same prefix may use it.
Blocks that must leave the device move to host memory, if there is any for them. This module does
not use jax: a group is a number, and so is a place in host memory, which holds one block; the
device's tables and copies are made from these numbers.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(eq=False)
class CacheBlock:
    """A block of tokens on the device, in host memory, or in both.

    Attributes:
        key: a hash of these tokens and of all before them; empty for a block of one preempted
            sequence, which no other finds.
        groups: its groups on the device, in the order of its tokens; (): it is in host memory.
        size: the number of its groups.
        place: its place in host memory; None: it has none.
        references: the number of running requests that use it.
        pins: the number of preempted sequences that will use it again.
    """

    key: bytes
    groups: tuple[int, ...]
    size: int = field(init=False)
    place: int | None = None
    references: int = 0
    pins: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.groups)


class Copy(NamedTuple):
    """The copy of a block between the device and host memory.

    Attributes:
        groups: its groups on the device.
        place: its place in host memory.
        out: whether it leaves the device; otherwise it comes back.
    """

    groups: tuple[int, ...]
    place: int
    out: bool


class BlockPool:
    """An allocator of groups, which keeps the blocks of finished requests until memory is needed.

    Every group except the last, which is scratch, is free, allocated to one request, or part of a
    block. An idle block that has to leave the device moves to host memory, where the least recently
    used ones are dropped for it. One that comes back keeps its place there as long as no other
    needs it, so that it can leave again without a copy.

    Attributes:
        size: the number of groups, without the scratch group.
        num_places: the number of places in host memory.
        pinned: the number of blocks with pins, which are never dropped.
    """

    def __init__(self, num_groups: int, num_places: int = 0) -> None:
        """Creates a pool of `num_groups` groups, the last one scratch, and places for blocks."""
        self.size, self.num_places, self.pinned = num_groups - 1, num_places, 0
        self._free = list(range(self.size - 1, -1, -1))
        self._free_places = list(range(num_places - 1, -1, -1))
        self._blocks: dict[bytes, CacheBlock] = {}
        # blocks on the device that no request uses, the least recently used first
        self._idle: OrderedDict[CacheBlock, None] = OrderedDict()
        self._num_idle = 0
        # blocks with a place, in the same order: on the device also, and in host memory only
        self._copied: OrderedDict[CacheBlock, None] = OrderedDict()
        self._away: OrderedDict[CacheBlock, None] = OrderedDict()
        self._copies: list[Copy] = []

    @property
    def available(self) -> int:
        """The number of groups that can be allocated: free ones and those of idle blocks."""
        return len(self._free) + self._num_idle

    @property
    def idle_groups(self) -> int:
        """The number of groups in idle blocks."""
        return self._num_idle

    @property
    def used_places(self) -> int:
        """The number of blocks with a place in host memory."""
        return self.num_places - len(self._free_places)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` groups; idle blocks leave the device if necessary.

        Raises:
            ValueError: fewer are available.
        """
        if count > self.available:
            raise ValueError(
                f"count={count}: must be at most {self.available}, the available groups"
            )
        while len(self._free) < count:
            self._move_out(next(iter(self._idle)))
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken[::-1]

    def free(self, groups: Iterable[int]) -> None:
        """Frees groups that belonged to one request."""
        self._free.extend(reversed(list(groups)))

    def take_copies(self) -> list[Copy]:
        """Returns the copies since the last call, to be made in this order."""
        copies, self._copies = self._copies, []
        return copies

    def num_cached(self, keys: Sequence[bytes], *, on_device: bool = False) -> int:
        """Returns the length of the cached prefix of these keys, in blocks.

        Blocks in host memory count, unless only those `on_device` are wanted.
        """
        for count, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None or (on_device and not block.groups):
                return count
        return len(keys)

    def find(self, keys: Sequence[bytes]) -> list[CacheBlock]:
        """Returns the blocks of these keys."""
        return [self._blocks[key] for key in keys]

    @staticmethod
    def cost(blocks: Sequence[CacheBlock]) -> int:
        """Returns the number of available groups that acquiring these blocks takes."""
        return sum(block.size for block in blocks if block.references == 0)

    def acquire(self, blocks: Sequence[CacheBlock]) -> None:
        """Adds a reference to each block, and brings those in host memory back to the device.

        Their `cost` must be available. While any block is pinned, only pinned ones may come back
        from host memory: it then has places for all that leave the device for them.
        """
        away = [block for block in blocks if not block.groups]
        for block in blocks:
            if block.groups and block.references == 0:
                self._leave_idle(block)
            block.references += 1
        for block in away:  # first, so that they are not dropped for blocks that move out
            del self._away[block]
        groups = iter(self.allocate(sum(block.size for block in away)))
        for block in away:
            assert block.place is not None
            block.groups = tuple(next(groups) for _ in range(block.size))
            self._copies.append(Copy(block.groups, block.place, out=False))
            self._copied[block] = None

    def share(self, key: bytes, groups: Sequence[int]) -> CacheBlock:
        """Makes a block of a request's groups, with one reference, the request's.

        Raises:
            ValueError: a block of this key exists.
        """
        if key in self._blocks:
            raise ValueError(f"key={key!r}: must not be the key of a block in the pool")
        block = self._blocks[key] = CacheBlock(key, tuple(groups), references=1)
        return block

    def release(self, blocks: Sequence[CacheBlock]) -> None:
        """Drops a reference to each block; blocks later in the prefix leave the device first.

        A block is useless without those before it.
        """
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0:
                self._idle[block] = None
                self._num_idle += block.size
                self._drop_if_useless(block)

    def pin(self, blocks: Sequence[CacheBlock]) -> None:
        """Keeps blocks for a preempted sequence; at most `num_places` may be pinned."""
        for block in blocks:
            self.pinned += block.pins == 0
            block.pins += 1
        assert self.pinned <= self.num_places

    def unpin(self, blocks: Sequence[CacheBlock]) -> None:
        """Drops a pin of each block."""
        for block in blocks:
            block.pins -= 1
            self.pinned -= block.pins == 0
            self._drop_if_useless(block)

    def dissolve(self, blocks: Sequence[CacheBlock]) -> list[int]:
        """Returns the groups of a request's own blocks to it.

        Their copies in host memory are dropped, since the request will write to the groups.
        """
        for block in blocks:
            self._free_place(block)
        return [group for block in blocks for group in block.groups]

    def clear(self) -> None:
        """Empties the prefix cache; blocks in use are freed with their last reference."""
        self._blocks.clear()
        for block in [*self._idle, *self._away]:
            self._drop_if_useless(block)

    def uncache(self, blocks: Sequence[CacheBlock]) -> None:
        """Removes blocks from the prefix cache; their groups are freed with the last reference."""
        for block in blocks:
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]

    def _move_out(self, block: CacheBlock) -> None:
        """Frees the groups of an idle block, which moves to host memory if it has a place there."""
        self._leave_idle(block)
        if block.place is None and (place := self._new_place()) is not None:
            block.place = place
            self._copies.append(Copy(block.groups, place, out=True))
        self._copied.pop(block, None)
        self._free.extend(reversed(block.groups))
        block.groups = ()
        if block.place is not None:
            self._away[block] = None
            return
        assert not block.pins, "pinned blocks have places in host memory"
        del self._blocks[block.key]

    def _new_place(self) -> int | None:
        """Returns a free place; None if all of them belong to pinned blocks."""
        if not self._free_places:
            # of blocks that are on the device also, only a copy is lost
            unpinned = (block for block in self._away if not block.pins)
            block = next(iter(self._copied), None) or next(unpinned, None)
            if block is None:
                return None
            self._free_place(block)
            if not block.groups:
                del self._blocks[block.key]
        return self._free_places.pop()

    def _leave_idle(self, block: CacheBlock) -> None:
        del self._idle[block]
        self._num_idle -= block.size

    def _free_place(self, block: CacheBlock) -> None:
        if block.place is not None:
            del (self._copied if block.groups else self._away)[block]
            self._free_places.append(block.place)
            block.place = None

    def _drop_if_useless(self, block: CacheBlock) -> None:
        """Frees a block's memory if nothing uses it and nothing can find it."""
        if block.references or block.pins or self._blocks.get(block.key) is block:
            return
        self._free_place(block)
        if block.groups:
            self._leave_idle(block)
            self._free.extend(reversed(block.groups))
            block.groups = ()


def block_keys(ids: np.ndarray, block_tokens: int, root: str) -> list[bytes]:
    """Returns the key of each whole block of a prompt.

    Keys form a chain: each depends on all tokens up to the block's end and on `root`, which names
    everything else that K and V depend on.
    """
    key = hashlib.blake2b(root.encode(), digest_size=16).digest()
    keys = []
    for end in range(block_tokens, len(ids) + 1, block_tokens):
        tokens = ids[end - block_tokens : end].tobytes()
        key = hashlib.blake2b(key + tokens, digest_size=16).digest()
        keys.append(key)
    return keys
