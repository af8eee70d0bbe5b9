"""Moves rows in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jaxtyping import Array

from jsparse.cache import OPTIONAL_FIELDS, LayerCache, map_pages, physical_pages, read_slots
from jsparse.shapes import Ids, Lengths


def move_rows(layer: LayerCache, ids: Ids, moved: Lengths) -> LayerCache:
    """Moves row ids[b, k, j] of each head to its slot j, for j < moved[b, k].

    Lengths and tables do not change. All listed rows are read before any is written.
    """
    slots = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    listed = slots < moved[..., None]
    pages = physical_pages(layer, jnp.where(listed, slots // layer.page_size, 0))
    at = (
        jnp.where(listed, pages, layer.k.shape[0]),
        slots % layer.page_size,
    )  # out of range: dropped

    def move(pool: Array) -> Array:
        return pool.at[at].set(read_slots(pool, layer, jnp.where(listed, ids, 0)), mode="drop")

    pools = {name: getattr(layer, name) for name in ("k", "v", *OPTIONAL_FIELDS)}
    return layer._replace(**{name: map_pages(move, pool) for name, pool in pools.items()})
