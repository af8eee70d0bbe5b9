"""Implements `api.runs_to_tokens` in plain jnp: the CPU path and the kernel's oracle."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.selection import Selection
from jsparse.shapes import Lengths


def runs_to_tokens(
    ids: Int32[Array, "B K R"],
    count: Lengths,
    edges: Int32[Array, "B #K edges"],
    lengths: Lengths | None,
    *,
    capacity: int,
) -> Selection:
    """Implements `api.runs_to_tokens` in plain jnp."""
    if lengths is not None:
        ids, count, edges = with_outside(ids, count, edges, lengths)
    chosen = jnp.arange(ids.shape[-1]) < count[..., None]
    ids = jnp.where(chosen, ids, 0)
    starts = jnp.take_along_axis(edges, ids, -1)
    sizes = jnp.where(chosen, jnp.take_along_axis(edges, ids + 1, -1) - starts, 0)
    ends = jnp.cumsum(sizes, -1, dtype=jnp.int32)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    # the run of a list entry is the number of runs that end at or before it
    search = partial(jnp.searchsorted, v=slot, side="right", method="scan_unrolled")
    nth = jnp.minimum(jax.vmap(jax.vmap(search))(ends), ids.shape[-1] - 1)
    count = jnp.minimum(ends[..., -1], capacity)
    tokens = slot + jnp.take_along_axis(starts - (ends - sizes), nth, -1)
    return Selection(jnp.where(slot < count[..., None], tokens, 0), count, granularity="token")


def with_outside(
    ids: Int32[Array, "B K R"],
    count: Lengths,
    edges: Int32[Array, "B #K edges"],
    lengths: Lengths,
) -> tuple[Int32[Array, "B K R+2"], Lengths, Int32[Array, "B K edges+2"]]:
    """Adds two chosen runs: the slots before the others, and the slots after them."""
    held = lengths[..., None]
    within = jnp.minimum(edges, held)
    edges = jnp.concatenate([jnp.zeros_like(held), within, held], -1)
    ids = jnp.pad(ids + 1, [(0, 0), (0, 0), (1, 1)])
    nth = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    return jnp.where(nth <= count[..., None], ids, edges.shape[-1] - 2), count + 2, edges
