"""Keeps K and V of an engine's rows in host memory, where the policy is `offloaded`.

Groups of pages are then groups in host memory, and a row that decodes has its newest tokens in a
tail on the device. Prompts are read as a session reads them: each layer's earlier tokens come over
the bus, and the chunk leaves once it has been read.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache, LayerCache
from jsparse.host_memory.pages import Leaving
from jsparse.host_memory.pool import pools
from jsparse.host_memory.tails import in_tail, newest_pages
from jsparse.policy import Policy
from jsparse.runtime.host_store import in_tails, ring_pages, stored_every
from jsparse.runtime.shared_pages import Pool, SharedPages, empty_rows
from jsparse.shapes import Rows


def empty_tails(spec: CacheSpec, policy: Policy) -> SharedPages:
    """Returns rows that decode, empty, with their tails and resident heads."""
    assert policy.offload is not None
    own = kv_cache.init(spec._replace(pool_pages=None))
    layers = in_tails(own, policy, ring_pages(spec, policy.offload)).layers

    def of_all(layer: LayerCache) -> Pool:
        k, v = (replace(pool, pages=spec.pages) for pool in pools(layer))
        return Pool(k, v)

    return empty_rows(spec, tuple(map(of_all, layers)))


def prompts(spec: CacheSpec, rows: SharedPages, max_new: int) -> KVCache:
    """Returns prompts that are being read as a cache of their own, whose pages lie in their order.

    Its tails have room for `max_new` tokens, the first of a page first, and are empty.
    """
    batch = len(rows.lengths)
    own = kv_cache.init(spec._replace(batch=batch, pool_pages=None))
    size = -(-max_new // spec.page_size) + 1
    lengths = jnp.broadcast_to(rows.lengths[:, None], (batch, spec.num_kv_heads))
    layers = (
        in_tail(layer, size, table=rows.table)._replace(lengths=lengths) for layer in own.layers
    )
    return own._replace(layers=tuple(layers), positions=rows.lengths)


def leaving(cache: KVCache, first: Rows, max_new: int) -> tuple[Leaving, ...]:
    """Returns the pages of each row's tokens from `first` on, at most `max_new`, by layer."""
    heads = cache.layers[0].lengths.shape
    return tuple(
        newest_pages(layer, jnp.broadcast_to(first[:, None], heads), max_new)
        for layer in cache.layers
    )


def tail_leaving(
    spec: CacheSpec, policy: Policy, rows: SharedPages, which: Int32[Array, "n"]
) -> tuple[Leaving, ...]:
    """Returns the pages that leave some rows between two of their steps, as often as they must."""
    assert policy.offload is not None
    every = stored_every(policy.offload, spec.page_size)
    part = rows.take(which)
    return leaving(part.of_rows(), jnp.maximum(part.lengths - every, 0), every)
