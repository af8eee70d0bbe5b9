"""Implements `api.place_logits` in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse.selection import Selection
from jsparse.selection.partials import MeanStatsKind, softmax_partial
from jsparse.shapes import Lengths


def place_logits(
    logits: Float32[Array, "pairs slots"],
    selection: Selection,
    lengths: Lengths,
    *,
    stats: MeanStatsKind,
    num_pages: int,
    page_size: int,
    by_slot: bool = False,
) -> Float32[Array, "B K units"]:
    """Implements `api.place_logits` in plain jnp."""
    read = logits.reshape(*lengths.shape, logits.shape[1] // page_size, page_size)
    nowhere = -1
    length = lengths[..., None]
    count = jnp.where(length > 0, selection.count[..., None], 0)
    nth = jnp.arange(selection.ids.shape[-1], dtype=jnp.int32)
    ids = jnp.where(nth < count, selection.ids, num_pages)
    newest = jnp.where(count > 0, (length - 1) // page_size, num_pages)
    row, head = (i[..., None] for i in jnp.indices(lengths.shape))
    entry = jnp.full((*lengths.shape, num_pages), nowhere, jnp.int32)
    entry = (
        entry.at[row, head, newest].set(count, mode="drop").at[row, head, ids].set(nth, mode="drop")
    )
    appended = entry == count
    if selection.dense is not None:
        page = jnp.arange(num_pages, dtype=jnp.int32)
        held = jnp.where(page * page_size < length, page, nowhere)
        entry = jnp.where(selection.dense[..., None], held, entry)
        appended &= ~selection.dense[..., None]
    attended = (entry != nowhere)[..., None]
    if by_slot:
        slot = jnp.arange(num_pages * page_size, dtype=jnp.int32).reshape(num_pages, page_size)
        length = length[..., None]
        attended &= (slot < length) & ((slot == length - 1) | ~appended[..., None])
    else:
        read = jnp.take_along_axis(read, entry[..., None], axis=2, mode="clip")
    placed = jnp.where(attended, read, -jnp.inf)
    if stats == "page_mass":
        return softmax_partial(placed)[2]
    return placed.reshape(*lengths.shape, num_pages * page_size)
