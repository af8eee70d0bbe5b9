"""Keeps K and V of an engine's rows in host memory, if the policy is `offloaded`.

Page groups are then in host memory, and a decoding row has its newest tokens in a tail on the
device. Prefill works as in a session: each layer's earlier tokens are copied to the device, and
each chunk is copied to host memory after its prefill.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse import cache as kv_cache
from jsparse.cache import KVCache, LayerCache, ReadOnly
from jsparse.engine.row_memory import DeviceRows, EvictingRows
from jsparse.engine.slots import PrefillRows, Slots
from jsparse.hooks import State
from jsparse.host_memory.pages import Leaving
from jsparse.host_memory.pool import with_pools
from jsparse.host_memory.tails import in_tail, newest_pages
from jsparse.policy import AnyPolicy, Policy
from jsparse.runtime import capacity
from jsparse.runtime.host_store import OnHost, page_bytes, with_newest
from jsparse.runtime.prefill import PrefillCarry
from jsparse.runtime.rows import Batch
from jsparse.runtime.shared_pages import Pool, SharedPages, empty_rows
from jsparse.runtime.state_axes import put_state, take_state
from jsparse.runtime.store import on_host
from jsparse.shapes import Rows


def memory_kind(policy: AnyPolicy) -> type[DeviceRows]:
    """Returns the kind of memory that a policy's rows need."""
    if on_host(policy):
        return HostRows
    return EvictingRows if isinstance(policy, Policy) and policy.evicts else DeviceRows


class HostRows(DeviceRows):
    """Rows with pages in host memory, and tails and resident heads on the device."""

    MOST_ROWS = 8  # the tail of a row takes half a gigabyte on the device for an 8B model
    PACKS = DECODES_SOME = False  # either would copy tails
    SINGLE_STEPS = True
    EXCLUDES: ClassVar[dict[str, object]] = {"cascade_attention": False, "kv_offloading_size": 0}

    def __init__(self, *given: Any) -> None:
        """Takes the arguments of DeviceRows."""
        super().__init__(*given)
        spec = self.decoding._replace(pool_pages=None)
        self._store = OnHost(self.policy, spec)
        self.tail_tokens = self._store.every
        self.host_group_bytes = spec.num_layers * spec.num_kv_heads * page_bytes(spec)

    def device_bytes(self, groups: int) -> int:
        """Returns the bytes of the policy's state; on a CPU, also of pages in its one memory."""
        on_device = capacity.policy_bytes(self.of_groups(groups), self.policy)
        if jax.default_backend() == "gpu":
            return on_device
        return on_device + groups * self.host_group_bytes

    def bytes_outside_pool(self, prompts: int, chunk: int) -> int:
        """Returns the device bytes of tails, resident heads and prompts in prefill.

        Prompts in prefill need one layer of K and V, the policy's state, and twice the memory of
        their chunks (which are copied to leave the device), or of a tail if that is more.
        """
        spec = self.decoding
        tokens = max(2 * chunk, self.tail_tokens)
        pages = prompts * spec.num_pages + spec.num_layers * (-(-tokens // spec.page_size) + 2)
        of_prompts = spec._replace(batch=prompts, pool_pages=None)
        read = capacity.policy_bytes(of_prompts, self.policy)
        return self._store.row_bytes() + read + spec.num_kv_heads * pages * page_bytes(spec)

    def empty(self) -> tuple[SharedPages, State, State]:
        """Returns empty rows, with their tails and resident heads."""
        spec = self.decoding

        def of_all(layer: LayerCache) -> Pool:
            return Pool.of(with_pools(lambda pool: replace(pool, pages=spec.pages), layer))

        layers = self._store.in_tails(kv_cache.init(spec._replace(pool_pages=None))).layers
        return empty_rows(spec, tuple(map(of_all, layers))), self.policy.init(spec), ()

    def of_prompts(
        self, slots: Slots, inputs: PrefillRows, lengths: Rows, size: int
    ) -> tuple[KVCache, State]:
        """Returns prompts as a batch, with their pages in order.

        Its tails are empty, with room for `size` tokens, and start at a page boundary.
        """
        spec, rows = self._prompts, slots.rows.cache.rows(inputs.groups, lengths)
        empty = kv_cache.init(spec._replace(batch=len(lengths), pool_pages=None))
        by_head = jnp.broadcast_to(lengths[:, None], (len(lengths), spec.num_kv_heads))
        room = -(-size // spec.page_size) + 1
        layers = (
            in_tail(layer, room, table=rows.table)._replace(lengths=by_head)
            for layer in empty.layers
        )
        pages = rows.pages_of(inputs.groups)
        state = take_state(self.policy, spec, slots.rows.state, inputs.slots, pages)
        return empty._replace(layers=tuple(layers), positions=lengths), state

    def after_prefill(
        self, slots: Slots, inputs: PrefillRows, end: Rows, carry: PrefillCarry
    ) -> tuple[Batch[SharedPages], State]:
        """Returns the rows with these prompts' groups and lengths, and the state of prompts."""
        rows, pages = slots.rows, slots.rows.cache.pages_of(inputs.groups)
        state = put_state(self.policy, self._prompts, rows.state, carry.state, inputs.slots, pages)
        cache = rows.cache.placed(inputs.slots, inputs.groups, end)
        return rows._replace(cache=cache, state=state), slots.prefill_state

    def leaving(self, cache: KVCache, first: Rows, size: int) -> tuple[Leaving, ...]:
        """Returns the pages of each row's tokens from `first` on, at most `size`, by layer."""
        heads = cache.layers[0].lengths.shape
        first = jnp.broadcast_to(first[:, None], heads)
        return tuple(map(partial(newest_pages, first=first, max_new=size), cache.layers))

    def with_newest(self, cache: KVCache, read_only: ReadOnly) -> KVCache:
        """Returns prompts with their newest tokens in their tails."""
        return with_newest(cache, read_only.host)

    def after_service(
        self, rows: Batch[SharedPages], part: Batch[SharedPages], which: Int32[Array, "n"]
    ) -> Batch[SharedPages]:
        """Returns all rows after a service, which leaves K and V unchanged."""
        state = put_state(self.policy, self.decoding, rows.state, part.state, which)
        return rows._replace(state=state)

    def tails_leaving(self, rows: SharedPages, which: Int32[Array, "n"]) -> tuple[Leaving, ...]:
        """Returns the tail pages to copy to host memory between two steps of rows, by layer."""
        part = rows.take(which)
        first = jnp.maximum(part.lengths - self.tail_tokens, 0)
        return self.leaving(part.of_rows(), first, self.tail_tokens)
