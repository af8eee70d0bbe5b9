"""Keeps K and V of an engine's rows in host memory, where the policy is `offloaded`.

Groups of pages are then groups in host memory, and a row that decodes has its newest tokens in a
tail on the device. Prompts are read as a session reads them: each layer's earlier tokens come over
the bus, and the chunk leaves once it has been read.
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
from jsparse.host_memory.pool import pools
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
    """Keeps pages in host memory, and tails and resident heads of rows on the device."""

    MOST_ROWS = 8  # a row of an 8B model has half a gigabyte on the device, its tail
    PACKS = DECODES_SOME = False  # which would copy tails
    SINGLE_STEPS = True
    EXCLUDES: ClassVar[dict[str, object]] = {"cascade_attention": False, "swap_space": 0}

    def __init__(self, *given: Any) -> None:
        """Prepares as DeviceRows does."""
        super().__init__(*given)
        spec = self.decoding._replace(pool_pages=None)
        self._store = OnHost(self.policy, spec)
        self.tail_tokens = self._store.every
        self.host_group_bytes = spec.num_layers * spec.num_kv_heads * page_bytes(spec)

    def device_bytes(self, groups: int) -> int:
        """Returns the bytes of the policy's state; on a CPU, whose memory is one, also of pages."""
        on_device = capacity.policy_bytes(self.of_groups(groups), self.policy)
        if jax.default_backend() == "gpu":
            return on_device
        return on_device + groups * self.host_group_bytes

    def bytes_outside_pool(self, prompts: int, chunk: int) -> int:
        """Returns the bytes on the device of what is on its way to host memory and back.

        These are the rows' tails and resident heads; of prompts that are being read, a layer and
        what the policy knows of them; and their chunks, which are there twice as they leave, or a
        tail.
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
            k, v = (replace(pool, pages=spec.pages) for pool in pools(layer))
            return Pool(k, v)

        layers = self._store.in_tails(kv_cache.init(spec._replace(pool_pages=None))).layers
        return empty_rows(spec, tuple(map(of_all, layers))), self.policy.init(spec), ()

    def of_prompts(
        self, slots: Slots, asked: PrefillRows, lengths: Rows, size: int
    ) -> tuple[KVCache, State]:
        """Returns prompts as a batch, whose pages lie in their order.

        Its tails are empty, and have room for `size` tokens, the first of a page first.
        """
        spec, rows = self._prompts, slots.rows.cache.rows(asked.groups, lengths)
        own = kv_cache.init(spec._replace(batch=len(lengths), pool_pages=None))
        by_head = jnp.broadcast_to(lengths[:, None], (len(lengths), spec.num_kv_heads))
        room = -(-size // spec.page_size) + 1
        layers = (
            in_tail(layer, room, table=rows.table)._replace(lengths=by_head) for layer in own.layers
        )
        pages = rows.pages_of(asked.groups)
        state = take_state(self.policy, spec, slots.rows.state, asked.slots, pages)
        return own._replace(layers=tuple(layers), positions=lengths), state

    def after_prefill(
        self, slots: Slots, asked: PrefillRows, end: Rows, carry: PrefillCarry
    ) -> tuple[Batch[SharedPages], State]:
        """Returns rows of which these have other groups and tokens, and the state of prompts."""
        rows, pages = slots.rows, slots.rows.cache.pages_of(asked.groups)
        state = put_state(self.policy, self._prompts, rows.state, carry.state, asked.slots, pages)
        cache = rows.cache.placed(asked.slots, asked.groups, end)
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
        """Returns all rows after a service, which has left K and V as they are."""
        state = put_state(self.policy, self.decoding, rows.state, part.state, which)
        return rows._replace(state=state)

    def tails_leaving(self, rows: SharedPages, which: Int32[Array, "n"]) -> tuple[Leaving, ...]:
        """Returns the pages that leave some rows between two of their steps, by layer."""
        part = rows.take(which)
        first = jnp.maximum(part.lengths - self.tail_tokens, 0)
        return self.leaving(part.of_rows(), first, self.tail_tokens)
