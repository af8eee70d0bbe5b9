"""Writes rows into the pages of a layer, in any memory and type."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.cache.layers import LayerCache, PagePool
from jsparse.cache.reading import physical_pages


def map_pages(function: Callable[..., Any], pool: Any) -> Any:
    """Returns a pool whose arrays of pages are those of `pool` through a function; None: None."""
    if isinstance(pool, PagePool):
        return pool.map_pages(function)
    return None if pool is None else function(pool)


def placed(
    pool: Any,
    layer: LayerCache,
    slots: Int32[Array, "B K T"],
    ok: Bool[Array, "B K T"],
    rows: Array,
) -> Any:
    """Returns an array [pages, P, …] or a PagePool with rows in the slots that are `ok`.

    Rows are [B, K, T, …].
    """
    if isinstance(pool, PagePool):
        return pool.written(layer, slots, ok, rows)
    pages = physical_pages(layer, jnp.where(ok, slots // layer.page_size, 0))
    pages = jnp.where(ok, pages, pool.shape[0])  # out of range: dropped
    return pool.at[pages, slots % layer.page_size].set(rows.astype(pool.dtype), mode="drop")
