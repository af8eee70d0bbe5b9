"""Allocates page groups, and caches blocks of them for requests with equal prefixes.

A *page group*, or group, is one page for every layer and KV head. A *block* is a run of groups
whose tokens filled whole prefill chunks, so that another request with the same prefix may use it.
This module does not use jax: a group is a number, and the page tables on the device are filled with
these numbers.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class CacheBlock:
    """The groups of one block of tokens, with a reference count.

    Attributes:
        key: a hash of these tokens and of all before them.
        groups: the block's groups, in the order of its tokens.
        references: the number of requests that use it.
    """

    key: bytes
    groups: tuple[int, ...]
    references: int = 0


class BlockPool:
    """An allocator of groups, which keeps the blocks of finished requests until memory is needed.

    Every group except the last, which is scratch, is free, allocated to one request, or part of a
    block.

    Attributes:
        size: the number of groups, without the scratch group.
    """

    def __init__(self, num_groups: int) -> None:
        """Creates a pool of `num_groups` groups; the last one is scratch."""
        self.size = num_groups - 1
        self._free = list(range(self.size - 1, -1, -1))
        self._blocks: dict[bytes, CacheBlock] = {}
        # blocks that no request uses, the least recently used first
        self._idle: OrderedDict[bytes, CacheBlock] = OrderedDict()
        self._num_idle = 0

    @property
    def available(self) -> int:
        """The number of groups that can be allocated: free ones and those of idle blocks."""
        return len(self._free) + self._num_idle

    @property
    def idle_groups(self) -> int:
        """The number of groups in idle blocks."""
        return self._num_idle

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` groups, evicting idle blocks if necessary.

        Raises:
            ValueError: fewer are available.
        """
        if count > self.available:
            raise ValueError(
                f"count={count}: must be at most {self.available}, the available groups"
            )
        while len(self._free) < count:
            _, block = self._idle.popitem(last=False)
            del self._blocks[block.key]
            self._num_idle -= len(block.groups)
            self._free.extend(reversed(block.groups))
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken[::-1]

    def free(self, groups: Iterable[int]) -> None:
        """Frees groups that belonged to one request."""
        self._free.extend(reversed(list(groups)))

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """Returns the length of the cached prefix of these keys, in blocks."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def idle(self, keys: Sequence[bytes]) -> int:
        """Returns the number of groups in the idle blocks among these."""
        return sum(len(self._idle[key].groups) for key in keys if key in self._idle)

    def find(self, keys: Sequence[bytes]) -> list[CacheBlock]:
        """Returns the blocks of these keys."""
        return [self._blocks[key] for key in keys]

    def acquire(self, keys: Sequence[bytes]) -> list[CacheBlock]:
        """Returns the blocks of these keys, and adds a reference to each."""
        blocks = self.find(keys)
        for block in blocks:
            if block.references == 0:
                del self._idle[block.key]
                self._num_idle -= len(block.groups)
            block.references += 1
        return blocks

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
        """Drops a reference to each block; blocks later in the prefix are evicted first.

        A block is useless without those before it.
        """
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0 and self._blocks.get(block.key) is block:
                self._idle[block.key] = block
                self._num_idle += len(block.groups)
            elif block.references == 0:
                self._free.extend(reversed(block.groups))

    def clear(self) -> None:
        """Empties the prefix cache; blocks in use are freed with their last reference."""
        for block in self._idle.values():
            self._free.extend(reversed(block.groups))
        self._idle.clear()
        self._blocks.clear()
        self._num_idle = 0

    def uncache(self, blocks: Sequence[CacheBlock]) -> None:
        """Removes blocks from the prefix cache; their groups are freed with the last reference."""
        for block in blocks:
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]


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
