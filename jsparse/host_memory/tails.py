"""Creates, refills and reads the tails of layers in host memory, and copies whole layers back."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.cache import LayerCache, map_pages, write
from jsparse.host_memory.pool import HostPool, first_pool, with_pools
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.shapes import BlockTable, ChunkKV, Lengths, Rows, Tokens


def in_tail(
    layer: LayerCache,
    ring_pages: int,
    heads: tuple[int, ...] = (),
    table: BlockTable | None = None,
) -> LayerCache:
    """Returns an empty layer with K and V in host memory, and rings of `ring_pages` pages.

    Resident heads have the pages of the layer, which has the identity table. `table` has the ids of
    its pages in host memory; None: the identity.
    """
    batch, kv_heads = layer.lengths.shape

    def pool(pages: Array) -> HostPool:
        shape = (batch, kv_heads, layer.num_pages, *pages.shape[1:])
        resident = pages.reshape(shape)[:, list(heads)] if heads else None
        return HostPool(
            ring=jnp.zeros((batch * kv_heads * ring_pages, *pages.shape[1:]), pages.dtype),
            host=None,
            resident=None if resident is None else resident.reshape(-1, *pages.shape[1:]),
            pages=pages.shape[0],
            heads=heads,
            table=table,
        )

    return layer._replace(k=map_pages(pool, layer.k), v=map_pages(pool, layer.v))


def refilled(layer: LayerCache, *, resident: bool = False) -> LayerCache:
    """Returns a layer whose rings have the newest pages of every head, from host memory.

    With `resident`, resident heads also get all their pages.
    """
    k = first_pool(layer)
    size = k.ring_pages(layer)
    newest = (layer.lengths[..., None] - 1) // layer.page_size
    pages = newest - jnp.arange(size, dtype=jnp.int32)
    ids = jnp.where(pages >= 0, k.host_pages(layer, jnp.maximum(pages, 0)), -1)
    at = jnp.where(pages >= 0, k.ring_at(layer, pages), k.ring.shape[0])

    def ring(pool: HostPool) -> HostPool:
        assert pool.host is not None
        rows = row_gather(pool.host, ids)
        return replace(pool, ring=pool.ring.at[at].set(rows, mode="drop"))

    layer = with_pools(ring, layer)
    if resident and k.resident is not None:
        count = (layer.lengths + layer.page_size - 1) // layer.page_size
        every = jnp.broadcast_to(jnp.arange(layer.num_pages), (*count.shape, layer.num_pages))
        all_ids, heads = k.host_pages(layer, every), list(k.heads)

        def filled(pool: HostPool) -> HostPool:
            assert pool.host is not None
            rows = row_gather(pool.host, all_ids[:, heads], count[:, heads])
            return replace(pool, resident=rows.reshape(-1, *pool.shape[1:]))

        layer = with_pools(filled, layer)
    return layer


def whole(
    layer: LayerCache,
    q: Array,
    new: tuple[ChunkKV, ChunkKV],
    positions: Tokens,
    valid: Rows,
) -> tuple[LayerCache, Array]:
    """Returns a layer with all of K and V on the device, and q; a layer on the device is unchanged.

    The tokens before the first `valid[b]` new ones are copied from host memory once the queries q
    are ready, so that two layers are on the device only briefly. (XLA drops this order unless the
    returned q is used.)
    """
    if not layer.on_host:
        return layer, q
    k = first_pool(layer)
    first = layer.lengths - valid[:, None]
    count = (first + layer.page_size - 1) // layer.page_size
    pages = jnp.arange(layer.num_pages, dtype=jnp.int32)
    ids = k.host_pages(layer, jnp.broadcast_to(pages, (*count.shape, pages.size)))
    ids, q = jax.lax.optimization_barrier((ids, q))

    def fetched(pool: HostPool) -> Array:
        assert pool.host is not None
        return row_gather(pool.host, ids, count).reshape(pool.shape)

    earlier = with_pools(fetched, layer)
    return write(earlier, *new, positions, valid, first), q


def newest_pages(
    layer: LayerCache, first: Lengths, max_new: int
) -> tuple[Int32[Array, "B K n"], tuple[Any, Any]]:
    """Returns the ids and contents of the pages of at most `max_new` tokens from `first` on.

    Ids are physical; -1: no page. Contents are like the pages of HostPages.
    """
    k = first_pool(layer)
    count = min(-(-max_new // layer.page_size) + 1, k.ring_pages(layer))
    page = first[..., None] // layer.page_size + jnp.arange(count, dtype=jnp.int32)
    exists = page * layer.page_size < layer.lengths[..., None]
    exists &= (first < layer.lengths)[..., None]
    ids = jnp.where(exists, k.host_pages(layer, jnp.minimum(page, layer.num_pages - 1)), -1)
    at = k.ring_at(layer, page)
    newest = with_pools(lambda pool: pool.ring[at], layer)
    return ids, (newest.k, newest.v)
