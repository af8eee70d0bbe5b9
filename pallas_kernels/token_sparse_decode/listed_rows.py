"""Multiplies by listed rows of K and V in plain jnp, block by block on a CPU.

Gathering all rows of a long list fills memory that is newly allocated in every call. A block of
them stays in a CPU's cache until it has been multiplied. On a GPU, a kernel multiplies by rows of K
if it supports them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import (
    LayerCache,
    PagePool,
    arrays_of,
    physical_pages,
    read_slots,
)
from jsparse.pallas_kernels.dispatch import no_triton
from jsparse.shapes import Pages

MAX_GROUP, MAX_WIDTH = 16, 256  # query heads and channels that the kernel supports
BLOCK = 512  # rows, of 512 bytes at 128 float32 channels: a quarter of a typical L2 cache


def products(
    q: Float[Array, "B K G H"],
    pool: Pages | PagePool,
    layer: LayerCache,
    slots: Int32[Array, "B K n"],
) -> Float32[Array, "B K G n"]:
    """Multiplies each query by the listed rows of its KV head."""

    def at_once(q: Array, pool: Array | PagePool, slots: Array) -> Array:
        rows = read_slots(pool, layer, slots)
        return jnp.einsum("bkgh,bknh->bkgn", q, rows, preferred_element_type=jnp.float32)

    def in_blocks(q: Array, pool: Array | PagePool, slots: Array) -> Array:
        rows, at = _blocks(pool, layer, slots)

        def of_head(head: tuple[Array, Array]) -> Array:
            own, blocks = head
            return jax.lax.map(
                lambda ids: jnp.einsum(
                    "nh,gh->ng", rows[ids], own, preferred_element_type=jnp.float32
                ),
                blocks,
            )

        found = jax.lax.map(of_head, (q.reshape(-1, *q.shape[2:]), at))
        found = found.reshape(*q.shape[:2], -1, q.shape[2]).swapaxes(2, 3)
        return found[..., : slots.shape[-1]]

    if _by_kernel(q, pool):
        from jsparse.pallas_kernels.token_sparse_decode import products_triton

        values, scales, reach = arrays_of(pool)
        scales = None if scales is None else scales.reshape(-1)
        return products_triton.products(q, *_placed(values, layer, slots), scales, reach)
    if slots.shape[-1] <= BLOCK:
        return at_once(q, pool, slots)
    return jax.lax.platform_dependent(q, pool, slots, cpu=in_blocks, default=at_once)


def _by_kernel(q: Float[Array, "B K G H"], pool: Any) -> bool:
    """Returns whether the kernel supports these queries and keys here."""
    fits = q.shape[2] <= MAX_GROUP and q.shape[3] <= MAX_WIDTH and q.dtype == pool.dtype
    on_host = isinstance(pool, PagePool) and pool.on_host
    return fits and not on_host and no_triton() is None


def weighted_sum(
    weights: Float[Array, "B K G n"],
    pool: Pages | PagePool,
    layer: LayerCache,
    slots: Int32[Array, "B K n"],
) -> Float32[Array, "B K G H"]:
    """Sums the listed rows of each KV head times the weights of its query heads."""

    def at_once(weights: Array, pool: Array | PagePool, slots: Array) -> Array:
        rows = read_slots(pool, layer, slots)
        return jnp.einsum("bkgn,bknh->bkgh", weights, rows, preferred_element_type=jnp.float32)

    def in_blocks(weights: Array, pool: Array | PagePool, slots: Array) -> Array:
        rows, at = _blocks(pool, layer, slots)
        batch, heads, group, number = weights.shape
        padded = jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, -number % BLOCK)))
        by_block = padded.reshape(batch * heads, group, -1, BLOCK).swapaxes(1, 2)

        def of_head(head: tuple[Array, Array]) -> Array:
            def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
                own, ids = block
                return total + jnp.einsum(
                    "gn,nh->gh", own, rows[ids], preferred_element_type=jnp.float32
                ), None

            return jax.lax.scan(add, jnp.zeros((group, rows.shape[-1]), jnp.float32), head)[0]

        return jax.lax.map(of_head, (by_block, at)).reshape(batch, heads, group, -1)

    if slots.shape[-1] <= BLOCK:
        return at_once(weights, pool, slots)
    return jax.lax.platform_dependent(weights, pool, slots, cpu=in_blocks, default=at_once)


def _blocks(
    pool: Pages | PagePool, layer: LayerCache, slots: Int32[Array, "B K n"]
) -> tuple[Float[Array, "rows H"], Int32[Array, "heads blocks BLOCK"]]:
    """Returns the pool by rows and each head's rows in it, padded with its slot 0.

    If a pool is in several memories, only the listed rows are fetched.
    """
    if isinstance(pool, PagePool):
        slots = jnp.pad(slots, ((0, 0), (0, 0), (0, -slots.shape[-1] % BLOCK)))
        at = jnp.arange(slots.size, dtype=jnp.int32)
        rows = pool.read_slots(layer, slots).reshape(slots.size, -1)
        return rows, at.reshape(layer.lengths.size, -1, BLOCK)
    slots = jnp.pad(slots, ((0, 0), (0, 0), (0, -slots.shape[-1] % BLOCK)))
    rows, at = _placed(pool, layer, slots)
    return rows, at.reshape(layer.lengths.size, -1, BLOCK)


def _placed(
    pool: Pages, layer: LayerCache, slots: Int32[Array, "B K n"]
) -> tuple[Float[Array, "rows H"], Int32[Array, "B K n"]]:
    """Returns the pool by rows, and the indices of each head's listed rows in it."""
    size = layer.page_size
    at = physical_pages(layer, slots // size) * size + slots % size
    return pool.reshape(-1, pool.shape[-1]), at
