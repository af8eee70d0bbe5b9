"""Keeps K, V and the policy's state of an engine's rows: on the device, or compressed there.

HostRows, in host_rows.py, has the same methods for K and V in host memory.
"""

from typing import Any, ClassVar

from jaxtyping import Array, Int32

from jsparse.cache import CacheSpec, KVCache, ReadOnly
from jsparse.engine.sizes import MAX_PREFILLS
from jsparse.engine.slots import PrefillRows, Slots
from jsparse.hooks import State
from jsparse.host_memory.pages import Leaving
from jsparse.policy import Policy
from jsparse.runtime import capacity
from jsparse.runtime.prefill import PrefillCarry
from jsparse.runtime.rows import Batch, take
from jsparse.runtime.shared_pages import SharedPages, empty_pages
from jsparse.runtime.state_axes import put_rows, put_state, take_state
from jsparse.shapes import Rows


class DeviceRows:
    """Keeps rows on the device: a prompt decodes in the groups that it was read into.

    Attributes:
        MOST_ROWS: the rows of an engine on a GPU, unless its options say otherwise.
        SINGLE_STEPS: whether a program runs one decode step.
        PACKS: whether one program may read several prompts.
        DECODES_SOME: whether programs may decode fewer rows than all.
        EXCLUDES: the options that can have one value alone, by name.
        policy, decoding: the policy, and the sizes of rows that decode.
        tail_tokens: the decoded tokens after which a row's newest leave for host memory; 0: none.
        host_group_bytes: the bytes of a group of pages in host memory.
        prefill_pages: the pages per head of prompts in prefill, beside those of rows.
    """

    MOST_ROWS = 64
    PACKS = DECODES_SOME = True
    SINGLE_STEPS = False
    EXCLUDES: ClassVar[dict[str, object]] = {}
    tail_tokens = host_group_bytes = prefill_pages = 0

    def __init__(self, policy: Policy, prompts: CacheSpec, decoding: CacheSpec) -> None:
        """Prepares for a policy and the sizes of rows, while prompts are read and afterwards."""
        self.policy, self._prompts, self.decoding = policy, prompts, decoding

    def device_bytes(self, groups: int) -> int:
        """Returns the bytes on the device of rows that share so many groups of pages."""
        return capacity.device_bytes(self.of_groups(groups), self.policy)

    def of_groups(self, groups: int) -> CacheSpec:
        """Returns the sizes of rows that decode, over a pool of so many groups of pages."""
        return self.decoding._replace(pool_pages=groups * self.decoding.num_kv_heads)

    def bytes_outside_pool(self, prompts: int, chunk: int) -> int:
        """Returns the bytes on the device beside the pool and the state of rows that decode.

        `prompts` are the prompts of a prefill program, and `chunk` the tokens of all their chunks.
        """
        return 0

    def empty(self) -> tuple[SharedPages, State, State]:
        """Returns empty rows, their state, and that of prompts that have one of their own."""
        policy, spec = self.policy, self.decoding
        return empty_pages(spec, fields=policy.fields), policy.init(spec), ()

    def of_prompts(
        self, slots: Slots, asked: PrefillRows, lengths: Rows, size: int
    ) -> tuple[KVCache, State]:
        """Returns prompts that hold `lengths` tokens as a batch, for at most `size` new ones."""
        state = self.state_of_prompts(slots, asked.slots, asked.places)
        return slots.rows.cache.rows(asked.groups, lengths).of_rows(), state

    def state_of_prompts(
        self, slots: Slots, which: Int32[Array, "R"], places: Int32[Array, "R"]
    ) -> State:
        """Returns the policy's state of prompts in these slots and places."""
        return take_state(self.policy, self._prompts, slots.rows.state, which)

    def after_prefill(
        self, slots: Slots, asked: PrefillRows, end: Rows, carry: PrefillCarry
    ) -> tuple[Batch[SharedPages], State]:
        """Returns rows, and the state of prompts, after a chunk of prompts up to tokens `end`."""
        rows = slots.rows
        both = rows.cache.rows(asked.groups, end).after(carry.cache), carry.state
        cache, state = put_rows(
            self.policy, self._prompts, rows.cache, rows.state, both, asked.slots
        )
        return rows._replace(cache=cache, state=state), slots.prefill_state

    def leaving(self, cache: KVCache, first: Rows, size: int) -> tuple[Leaving, ...]:
        """Returns the pages that leave for host memory after a chunk from `first` on, by layer."""
        return ()

    def with_newest(self, cache: KVCache, read_only: ReadOnly) -> KVCache:
        """Returns prompts with their newest tokens on the device."""
        return cache

    def tails_leaving(self, rows: SharedPages, which: Int32[Array, "n"]) -> tuple[Leaving, ...]:
        """Returns the pages that leave some rows between two of their steps, by layer."""
        return ()

    def due(self, rows: Batch[SharedPages], which: Int32[Array, "n"]) -> Batch[SharedPages]:
        """Returns the rows that are due for a service as a batch of their own."""
        return take(self.policy, self.decoding, rows, which)

    def after_service(
        self, rows: Batch[SharedPages], part: Batch[SharedPages], which: Int32[Array, "n"]
    ) -> Batch[SharedPages]:
        """Returns all rows after a service of the rows that `due` returned."""
        both = part.cache, part.state
        cache, state = put_rows(self.policy, self.decoding, rows.cache, rows.state, both, which)
        return rows._replace(cache=cache, state=state)


class EvictingRows(DeviceRows):
    """Keeps rows of a policy that evicts: prompts are compressed into groups of their own.

    While they are read, they have a state of their own, by place.
    """

    def __init__(self, *given: Any) -> None:
        """Prepares as DeviceRows does."""
        super().__init__(*given)
        self._prefill_spec = self._prompts._replace(batch=MAX_PREFILLS)
        self.prefill_pages = self._prefill_spec.num_pages

    def bytes_outside_pool(self, prompts: int, chunk: int) -> int:
        """Returns the bytes of the state of prompts."""
        spec = self._prefill_spec._replace(pool_pages=None)
        return capacity.state_bytes(spec, self.policy)

    def empty(self) -> tuple[SharedPages, State, State]:
        """Returns empty rows, whose heads will hold different tokens, and both states."""
        policy, spec = self.policy, self.decoding
        pages = empty_pages(spec, fields=policy.fields, by_head=True)
        return pages, policy.init(spec), policy.init(self._prefill_spec)

    def state_of_prompts(
        self, slots: Slots, which: Int32[Array, "R"], places: Int32[Array, "R"]
    ) -> State:
        """Returns the state of the prompts in these places."""
        return take_state(self.policy, self._prefill_spec, slots.prefill_state, places)

    def after_prefill(
        self, slots: Slots, asked: PrefillRows, end: Rows, carry: PrefillCarry
    ) -> tuple[Batch[SharedPages], State]:
        """Returns rows over the pages that the chunk has left, and the state of prompts."""
        part = slots.rows.cache.rows(asked.groups, end).after(carry.cache)
        rows = slots.rows._replace(cache=slots.rows.cache.with_pages_of(part))
        state = put_state(
            self.policy, self._prefill_spec, slots.prefill_state, carry.state, asked.places
        )
        return rows, state

    def due(self, rows: Batch[SharedPages], which: Int32[Array, "n"]) -> Batch[SharedPages]:
        """Returns rows that are due; numbers behind the last row stand for rows without tokens."""
        part = super().due(rows, which)
        return part._replace(cache=part.cache.emptied(which >= self.decoding.batch))
