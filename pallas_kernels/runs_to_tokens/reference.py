"""Implements `api.runs_to_tokens` in plain jnp, as CPU path and oracle of the kernel."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.selection import Selection
from jsparse.shapes import Lengths


def runs_to_tokens(
    ids: Int32[Array, "B K R"],
    count: Lengths,
    starts: Int32[Array, "B #K n"],
    lengths: Int32[Array, "B #K n"],
    *,
    capacity: int,
    ends: bool,
) -> Selection:
    """Implement `api.runs_to_tokens` in plain jnp."""
    if ends:
        ids, count = with_ends(ids, count, starts.shape[2] - 1)
    chosen = jnp.arange(ids.shape[-1]) < count[..., None]
    ids = jnp.where(chosen, ids, 0)
    sizes = jnp.where(chosen, jnp.take_along_axis(lengths, ids, -1), 0)
    until = jnp.cumsum(sizes, -1, dtype=jnp.int32)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    # the run of an entry of the list is the number of runs that end at or before it
    search = partial(jnp.searchsorted, v=slot, side="right", method="scan_unrolled")
    nth = jnp.minimum(jax.vmap(jax.vmap(search))(until), ids.shape[-1] - 1)
    shift = jnp.take_along_axis(starts, ids, -1) - (until - sizes)
    count = jnp.minimum(until[..., -1], capacity)
    tokens = slot + jnp.take_along_axis(shift, nth, -1)
    return Selection(jnp.where(slot < count[..., None], tokens, 0), count, granularity="token")


def with_ends(
    ids: Int32[Array, "B K R"], count: Lengths, last: int
) -> tuple[Int32[Array, "B K R+2"], Lengths]:
    """Return the runs between the ends behind the first run and before the last."""
    ids = jnp.pad(ids + 1, [(0, 0), (0, 0), (1, 1)])
    nth = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    return jnp.where(nth <= count[..., None], ids, last), count + 2
