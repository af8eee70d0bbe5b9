"""Makes, refills and reads the tails of layers in host memory, and brings whole layers back."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.cache import LayerCache, physical_pages, write
from jsparse.host_memory.pool import HostPool, pools
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.shapes import ChunkKV, Lengths, Rows, Tokens


def in_tail(layer: LayerCache, ring_pages: int, heads: tuple[int, ...] = ()) -> LayerCache:
    """Returns an empty layer whose K and V lie in host memory, with rings of that many pages.

    Resident heads' pages are those of the layer, which has the identity table.
    """
    batch, kv_heads = layer.lengths.shape

    def pool(pages: Array) -> HostPool:
        shape = (batch, kv_heads, layer.num_pages, *pages.shape[1:])
        own = pages.reshape(shape)[:, list(heads)] if heads else None
        return HostPool(
            ring=jnp.zeros((batch * kv_heads * ring_pages, *pages.shape[1:]), pages.dtype),
            host=None,
            resident=None if own is None else own.reshape(-1, *pages.shape[1:]),
            pages=pages.shape[0],
            heads=heads,
        )

    k, v = map(pool, layer.arrays)
    return layer._replace(k=k, v=v)


def refilled(layer: LayerCache) -> LayerCache:
    """Returns a layer with the newest pages of every head in its ring, as host memory has them."""
    k, v = pools(layer)
    size = k.ring_pages(layer)
    newest = (layer.lengths[..., None] - 1) // layer.page_size
    pages = newest - jnp.arange(size, dtype=jnp.int32)
    ids = jnp.where(pages >= 0, physical_pages(layer, jnp.maximum(pages, 0)), -1)
    at = jnp.where(pages >= 0, k.ring_at(layer, pages), k.ring.shape[0])

    def ring(pool: HostPool) -> HostPool:
        assert pool.host is not None
        rows = row_gather(pool.host, ids)
        return replace(pool, ring=pool.ring.at[at].set(rows, mode="drop"))

    return layer._replace(k=ring(k), v=ring(v))


def whole(
    layer: LayerCache,
    q: Array,
    new: tuple[ChunkKV, ChunkKV],
    positions: Tokens,
    valid: Rows,
) -> tuple[LayerCache, Array]:
    """Returns a layer with all of K and V on the device, or as it is if it lies there, and q.

    The tokens before the first `valid[b]` new ones come from host memory, once the
    queries q are there, so that no two layers are on the device for long. (XLA drops the order of
    the two unless the q that is returned is used.)
    """
    if layer.page_pools is None:
        return layer, q
    k, v = pools(layer)
    first = layer.lengths - valid[:, None]
    count = (first + layer.page_size - 1) // layer.page_size
    pages = jnp.arange(layer.num_pages, dtype=jnp.int32)
    ids = physical_pages(layer, jnp.broadcast_to(pages, (*count.shape, pages.size)))
    ids, q = jax.lax.optimization_barrier((ids, q))

    def fetched(pool: HostPool) -> Array:
        assert pool.host is not None
        return row_gather(pool.host, ids, count).reshape(pool.shape)

    earlier = layer._replace(k=fetched(k), v=fetched(v))
    return write(earlier, *new, positions, valid, first), q


def newest_pages(
    layer: LayerCache, first: Lengths, max_new: int
) -> tuple[Int32[Array, "B K n"], tuple[Array, Array]]:
    """Returns the pages of the tokens from `first` on, at most `max_new`, and their K and V.

    Ids are physical; -1 is none.
    """
    k, v = pools(layer)
    count = min(-(-max_new // layer.page_size) + 1, k.ring_pages(layer))
    page = first[..., None] // layer.page_size + jnp.arange(count, dtype=jnp.int32)
    exists = page * layer.page_size < layer.lengths[..., None]
    ids = jnp.where(exists, physical_pages(layer, jnp.minimum(page, layer.num_pages - 1)), -1)
    at = k.ring_at(layer, page)
    return ids, (k.ring[at], v.ring[at])
