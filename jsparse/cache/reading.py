"""Reads pages, slots and whole heads of a layer, in any memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jsparse.cache.layers import LayerCache, PagePool


def physical_pages(layer: LayerCache, logical: Int32[Array, "B K n"]) -> Int32[Array, "B K n"]:
    """Returns the physical pages of logical ones, whose ids must be in [0, M)."""
    if layer.block_table is not None:
        return jnp.take_along_axis(layer.block_table, logical, axis=2, mode="clip")
    batch, heads = layer.lengths.shape
    first = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1) * layer.num_pages
    return first + logical


def read_pages(pool: Array | PagePool, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
    """Reads selected pages of each head, [B, K, n, P, …], from a pool such as `layer.k`.

    A pool is [pages, P, …].
    """
    return _pool(pool).read_pages(layer, logical)


def read_slots(pool: Array | PagePool, layer: LayerCache, slots: Int32[Array, "B K n"]) -> Array:
    """Reads selected slots of each head one by one, [B, K, n, …], from a pool [pages, P, …]."""
    return _pool(pool).read_slots(layer, slots)


def read_heads(pool: Array | PagePool, layer: LayerCache) -> Array:
    """Reads every slot of every head, [B, K, S, …], from a pool [pages, P, …].

    Under the identity table this is a reshape.
    """
    return _pool(pool).read_heads(layer)


def one_head(
    layer: LayerCache, head: Int32[Array, ""], pages: Int32[Array, "M"], length: Int32[Array, ""]
) -> LayerCache:
    """Returns one head of a row as a layer: KV head `head` with these physical pages."""
    k, v = (pool.of_head(head) if isinstance(pool, PagePool) else pool for pool in layer[:2])
    return layer._replace(k=k, v=v, lengths=length[None, None], block_table=pages[None, None])


class _Plain(NamedTuple):
    """An array as a pool: all of its pages are on the device."""

    pages: Array

    def read_pages(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
        return self.pages[physical_pages(layer, logical)]

    def read_slots(self, layer: LayerCache, slots: Int32[Array, "B K n"]) -> Array:
        page, offset = slots // layer.page_size, slots % layer.page_size
        return self.pages[physical_pages(layer, page), offset]

    def read_heads(self, layer: LayerCache) -> Array:
        pages = self.pages if layer.block_table is None else self.pages[layer.block_table]
        return pages.reshape(*layer.lengths.shape, layer.capacity, *self.pages.shape[2:])

    def rounded(self, rows: Array) -> Array:
        return rounded_to(rows, self.pages.dtype)


def _pool(pool: Array | PagePool) -> _Plain | PagePool:
    return pool if isinstance(pool, PagePool) else _Plain(pool)


def rounded(pool: Array | PagePool, rows: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
    """Returns rows of K or V as reading returns them once `pool` holds them."""
    return _pool(pool).rounded(rows)


def rounded_to(x: Float[Array, "*any"], dtype: DTypeLike) -> Float[Array, "*any"]:
    """Returns numbers in a type, to whose precision they stay rounded in a wider one.

    XLA may remove a cast to a narrower type and back, but not `reduce_precision`, which flushes
    float16's subnormal numbers, nor a cast before a barrier.
    """
    kept = jnp.finfo(dtype)
    if kept.nexp < jnp.finfo(x.dtype).nexp:
        return lax.optimization_barrier(x.astype(dtype))
    return lax.reduce_precision(x, kept.nexp, kept.nmant).astype(dtype)


def slot_positions(layer: LayerCache) -> Int32[Array, "B K S"]:
    """Returns the text position of every slot of every head.

    It is the slot's index unless a policy keeps positions.
    """
    if layer.slot_positions is not None:
        return read_heads(layer.slot_positions, layer)
    shape = (*layer.lengths.shape, layer.capacity)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 2)
