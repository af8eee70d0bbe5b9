"""Compresses a layer: chooses the slots that its heads keep, and moves them to the front."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt8

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.pallas_kernels.window_attention import window_attention
from jsparse.policies.eviction.budgets import Attended
from jsparse.policies.eviction.merging import merged_slot, put_slot
from jsparse.policies.eviction.settings import EvictionState, LayerView, Settings
from jsparse.policies.eviction.window import mean_query
from jsparse.selection import MAX_BITS_PAGE, Selection, everything, from_token_mask, union
from jsparse.selection.attended import token_mask
from jsparse.shapes import Lengths, Rows


def compress(
    settings: Settings,
    entry: EvictionState,
    kv: LayerCache,
    positions: Rows,
    constants: Mapping[str, Array] | None = None,
) -> tuple[EvictionState, LayerCache]:
    """Drops the slots of a layer with the lowest scores, and closes the gaps."""
    competing = competing_in(settings, kv)
    view = LayerView(kv, competing, entry.ring, positions, entry.tracked, constants)
    scores = settings.score(view)

    def attended() -> Attended:
        return attention(settings, view)

    wanted, temperatures = settings.rule(scores, competing, entry.temperatures, attended)
    scores = jnp.where(competing, scores, -jnp.inf)
    chosen, missed = best(scores, wanted, settings.kept), entry.missed
    if missed is not None:
        lost, period = ~_marked(chosen, kv) & (missed < settings.patience), settings.period
        waiting = best(jnp.where(lost, scores, -jnp.inf), jnp.full_like(wanted, period), period)
        missed = jnp.where(_marked(waiting, kv) & competing, missed + 1, 0).astype(jnp.uint8)
        chosen = union(chosen, waiting, kv.capacity)
    keep = _between(chosen, competing, kv, settings.first, settings.newest)
    if settings.merge:
        dropped = competing & ~_marked(chosen, kv)
        query = mean_query(entry.ring, positions, kv.lengths.shape[1])
        compacted = _merging(kv, keep, dropped, query, settings.sink)
    else:
        compacted = compact_pages(kv, keep)
    tracked, missed = (x if x is None else _moved(x, keep) for x in (entry.tracked, missed))
    return EvictionState(entry.ring, tracked, temperatures, missed), compacted


def attention(settings: Settings, view: LayerView) -> Attended:
    """Measures the window's attention to the competing slots and to the merged one.

    A query's shares are its softmax over all slots up to its own token.
    """
    kv = view.kv
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    older = slots < kv.lengths[..., None] - settings.newest
    shares = window_attention(view.ring, view.positions, kv, older, over="held")
    merged = shares[..., settings.sink] if settings.merge else jnp.zeros_like(shares[..., 0])
    return Attended(jnp.where(view.competing, shares, 0.0), merged)


def competing_in(settings: Settings, kv: LayerCache) -> Bool[Array, "B K S"]:
    """Marks the competing slots: all except the first, protected ones and the newest."""
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    return (slots >= settings.first) & (slots < kv.lengths[..., None] - settings.newest)


def best(scores: Float32[Array, "B K S"], wanted: Lengths, max_length: int) -> Selection:
    """Lists the `wanted` ≤ `max_length` best slots of each head, as tokens, never one with -inf."""
    scores = jnp.where((wanted > 0)[..., None], scores, -jnp.inf)
    capacity = max(min(max_length, scores.shape[-1]), 1)
    return threshold_select(scores[:, :, None], TopK(wanted), capacity=capacity, weights="raw")


def _between(
    chosen: Selection, competing: Bool[Array, "B K S"], kv: LayerCache, first: int, newest: int
) -> Selection:
    """Lists a head's protected slots and, between them, the chosen competing ones."""
    nth = jnp.arange(min(first + chosen.ids.shape[-1] + newest, kv.capacity), dtype=jnp.int32)
    dropped = jnp.sum(competing, -1, dtype=jnp.int32) - chosen.count
    end = first + chosen.count[..., None]
    at = jnp.clip(nth - first, 0, chosen.ids.shape[-1] - 1)
    inside = jnp.take_along_axis(chosen.ids, jnp.broadcast_to(at, (*end.shape[:2], nth.size)), 2)
    ids = jnp.where(nth < first, nth, jnp.where(nth < end, inside, nth + dropped[..., None]))
    count = kv.lengths - dropped
    ids = jnp.where(nth < count[..., None], ids, 0)
    return Selection(ids, count, granularity="token")


def _merging(
    kv: LayerCache,
    keep: Selection,
    dropped: Bool[Array, "B K S"],
    query: Float32[Array, "B K H"],
    slot: int,
) -> LayerCache:
    """Merges the dropped slots into one, and moves the kept ones."""
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    merged = merged_slot(kv, dropped | (slots == slot), query)
    # the dropped slots are read before anything moves, or XLA would move a copy
    kv, keep, merged = jax.lax.optimization_barrier((kv, keep, merged))
    return put_slot(compact_pages(kv, keep), slot, merged, keep.count < kv.lengths)


def not_waiting(kv: LayerCache, missed: UInt8[Array, "B K S"] | None) -> Selection:
    """Selects all slots except those that wait."""
    if missed is None:
        return everything(kv.lengths)
    there = jnp.arange(kv.capacity, dtype=jnp.int32) < kv.lengths[..., None]
    pages = kv.page_size <= MAX_BITS_PAGE
    return from_token_mask(
        there & (missed == 0),
        kv.num_pages if pages else kv.capacity,
        page_size=kv.page_size,
        granularity="page" if pages else "token",
    )


def _marked(chosen: Selection, kv: LayerCache) -> Bool[Array, "B K S"]:
    """Marks the listed slots, and possibly the newest, which does not compete."""
    return token_mask(chosen, kv.lengths, num_pages=kv.num_pages, page_size=kv.page_size)


def _moved(numbers: Array, keep: Selection) -> Array:
    """Moves numbers per slot as compact_pages moves rows; after the kept slots they are 0."""
    nth = jnp.arange(keep.ids.shape[-1], dtype=jnp.int32)
    moved = jnp.take_along_axis(numbers, keep.ids, axis=-1)
    moved = jnp.where(nth < keep.count[..., None], moved, 0)
    rest = numbers.shape[-1] - nth.size
    return jnp.pad(moved, [(0, 0)] * (numbers.ndim - 1) + [(0, rest)])
