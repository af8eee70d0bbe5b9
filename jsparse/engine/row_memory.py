"""Keeps K, V and the policy's state of an engine's rows on the device, compressed or not.

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
    """Rows on the device: a prompt decodes in the groups of its prefill.

    Attributes:
        MOST_ROWS: the default number of rows on a GPU.
        SINGLE_STEPS: whether a program runs only one decode step.
        PACKS: whether one program may prefill several prompts.
        DECODES_SOME: whether programs may decode fewer rows than all.
        EXCLUDES: the options with only one allowed value, by name.
        policy, decoding: the policy, and the sizes of decoding rows.
        tail_tokens: the number of decoded tokens after which a row's newest tokens are copied to
            host memory; 0: never.
        host_group_bytes: the bytes of a page group in host memory.
        prefill_pages: the pages per head of prompts in prefill, besides those of rows.
    """

    MOST_ROWS = 64
    PACKS = DECODES_SOME = True
    SINGLE_STEPS = False
    EXCLUDES: ClassVar[dict[str, object]] = {}
    tail_tokens = host_group_bytes = prefill_pages = 0

    def __init__(self, policy: Policy, prompts: CacheSpec, decoding: CacheSpec) -> None:
        """Stores the policy and the sizes of rows, during prefill and while decoding."""
        self.policy, self._prompts, self.decoding = policy, prompts, decoding

    def device_bytes(self, groups: int) -> int:
        """Returns the device bytes of rows that share `groups` page groups."""
        return capacity.device_bytes(self.of_groups(groups), self.policy)

    def of_groups(self, groups: int) -> CacheSpec:
        """Returns the sizes of decoding rows, over a pool of `groups` page groups."""
        return self.decoding._replace(pool_pages=groups * self.decoding.num_kv_heads)

    def bytes_outside_pool(self, prompts: int, chunk: int) -> int:
        """Returns the device bytes besides the pool and the state of decoding rows.

        `prompts` is the number of prompts in a prefill program, and `chunk` the tokens of all their
        chunks.
        """
        return 0

    def empty(self) -> tuple[SharedPages, State, State]:
        """Returns empty rows, their state, and the separate state of prompts in prefill, if any."""
        policy, spec = self.policy, self.decoding
        return empty_pages(spec, fields=policy.fields), policy.init(spec), ()

    def of_prompts(
        self, slots: Slots, inputs: PrefillRows, lengths: Rows, size: int
    ) -> tuple[KVCache, State]:
        """Returns prompts with `lengths` tokens as a batch, with room for `size` new ones."""
        state = self.state_of_prompts(slots, inputs.slots, inputs.places)
        return slots.rows.cache.rows(inputs.groups, lengths).of_rows(), state

    def state_of_prompts(
        self, slots: Slots, which: Int32[Array, "R"], places: Int32[Array, "R"]
    ) -> State:
        """Returns the policy's state of prompts in these slots and places."""
        return take_state(self.policy, self._prompts, slots.rows.state, which)

    def after_prefill(
        self, slots: Slots, inputs: PrefillRows, end: Rows, carry: PrefillCarry
    ) -> tuple[Batch[SharedPages], State]:
        """Returns the rows, and the state of prompts, after chunks that end at positions `end`."""
        rows = slots.rows
        both = rows.cache.rows(inputs.groups, end).after(carry.cache), carry.state
        cache, state = put_rows(
            self.policy, self._prompts, rows.cache, rows.state, both, inputs.slots
        )
        return rows._replace(cache=cache, state=state), slots.prefill_state

    def leaving(self, cache: KVCache, first: Rows, size: int) -> tuple[Leaving, ...]:
        """Returns the pages to copy to host memory after a chunk from `first` on, by layer."""
        return ()

    def with_newest(self, cache: KVCache, read_only: ReadOnly) -> KVCache:
        """Returns prompts with their newest tokens on the device."""
        return cache

    def tails_leaving(self, rows: SharedPages, which: Int32[Array, "n"]) -> tuple[Leaving, ...]:
        """Returns the tail pages to copy to host memory between two steps of rows, by layer."""
        return ()

    def due(self, rows: Batch[SharedPages], which: Int32[Array, "n"]) -> Batch[SharedPages]:
        """Returns the rows that are due for a service, as a batch."""
        return take(self.policy, self.decoding, rows, which)

    def after_service(
        self, rows: Batch[SharedPages], part: Batch[SharedPages], which: Int32[Array, "n"]
    ) -> Batch[SharedPages]:
        """Returns all rows after a service of the rows that `due` returned."""
        both = part.cache, part.state
        cache, state = put_rows(self.policy, self.decoding, rows.cache, rows.state, both, which)
        return rows._replace(cache=cache, state=state)


class EvictingRows(DeviceRows):
    """Rows of a policy that evicts: prompts are compressed into groups of their own.

    Prompts in prefill have a separate state, by place.
    """

    def __init__(self, *given: Any) -> None:
        """Takes the arguments of DeviceRows."""
        super().__init__(*given)
        self._prefill_spec = self._prompts._replace(batch=MAX_PREFILLS)
        self.prefill_pages = self._prefill_spec.num_pages

    def bytes_outside_pool(self, prompts: int, chunk: int) -> int:
        """Returns the bytes of the state of prompts in prefill."""
        spec = self._prefill_spec._replace(pool_pages=None)
        return capacity.state_bytes(spec, self.policy)

    def empty(self) -> tuple[SharedPages, State, State]:
        """Returns empty rows, whose heads may hold different tokens, and both states."""
        policy, spec = self.policy, self.decoding
        pages = empty_pages(spec, fields=policy.fields, by_head=True)
        return pages, policy.init(spec), policy.init(self._prefill_spec)

    def state_of_prompts(
        self, slots: Slots, which: Int32[Array, "R"], places: Int32[Array, "R"]
    ) -> State:
        """Returns the state of the prompts in these places."""
        return take_state(self.policy, self._prefill_spec, slots.prefill_state, places)

    def after_prefill(
        self, slots: Slots, inputs: PrefillRows, end: Rows, carry: PrefillCarry
    ) -> tuple[Batch[SharedPages], State]:
        """Returns the rows with the pages that the chunk wrote, and the state of prompts."""
        part = slots.rows.cache.rows(inputs.groups, end).after(carry.cache)
        rows = slots.rows._replace(cache=slots.rows.cache.with_pages_of(part))
        state = put_state(
            self.policy, self._prefill_spec, slots.prefill_state, carry.state, inputs.places
        )
        return rows, state

    def due(self, rows: Batch[SharedPages], which: Int32[Array, "n"]) -> Batch[SharedPages]:
        """Returns rows that are due; indices past the last row stand for rows without tokens."""
        part = super().due(rows, which)
        return part._replace(cache=part.cache.emptied(which >= self.decoding.batch))
