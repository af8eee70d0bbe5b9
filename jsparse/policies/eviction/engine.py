"""Compresses a cache: scores the slots of each KV head, drops the worst and moves the rest up.

A head's slots are, in their order: the first few, which are protected (sinks, and behind them the
merged slot where there is one), those that compete, and the newest, which are protected too. A
compression keeps the best of those that compete. It runs once after the prompt and then every
`period` tokens of a row's own. In between everything that is left is attended to.

The merged slot stands for all that a head ever dropped (`merging`). The token that lies there at
first is the first to be merged: of itself alone, that changes nothing.
"""

from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, UInt8

from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView, cut_pages, replace_layer
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.policies.eviction.budgets import MAX_SLOTS, CountFn
from jsparse.policies.eviction.merging import merged_slot, put_slot
from jsparse.policies.eviction.window import as_ring, mean_query
from jsparse.policy import Eviction, MaxLengthFn, Policy, PrefillView, Services, State, at_layer
from jsparse.selection import (
    MAX_BITS_PAGE,
    Selection,
    everything,
    from_token_mask,
    token_mask,
    union,
)
from jsparse.shapes import Lengths, Queries, Rows


class EvictionState(NamedTuple):
    """Holds one layer's state; rows own all of it.

    Attributes:
        ring: the newest W queries; that of position p lies at p % W.
        tracked: a number per slot that the method keeps up to date; None if it has none.
        temperatures: those of the budget rule `calibrated`; 0 where it has found none yet.
        missed: how many compressions in a row left out each slot that waits; None without patience.
    """

    ring: Float[Array, "B W N H"]
    tracked: Float32[Array, "B K S"] | None = None
    temperatures: Float32[Array, "B K"] | None = None
    missed: UInt8[Array, "B K S"] | None = None


class LayerView(NamedTuple):
    """Holds what a method scores the slots of a layer by.

    Attributes:
        held: the layer's cache.
        competing: the slots to score.
        ring, tracked: those of the state.
        positions: the number of tokens so far of each row.
    """

    held: LayerCache
    competing: Bool[Array, "B K S"]
    ring: Float[Array, "B W N H"]
    positions: Rows
    tracked: Float32[Array, "B K S"] | None


class ScoreFn(Protocol):
    """Return a score for every slot; those that do not compete are ignored."""

    def __call__(self, view: LayerView, /) -> Float32[Array, "B K S"]: ...


class TrackFn(Protocol):
    """Return the tracked numbers after a step.

    `shares` are of the attention of the group's mean query, 0 where nothing is held; `positions`
    are those of the newest tokens.
    """

    def __call__(
        self,
        tracked: Float32[Array, "B K S"],
        shares: Float32[Array, "B K S"],
        lengths: Lengths,
        positions: Rows,
        /,
    ) -> Float32[Array, "B K S"]: ...


class Tracking(NamedTuple):
    """Says how the tracked numbers begin at the prompt's end, and how every step moves them."""

    begin: ScoreFn
    step: TrackFn


class Settings(NamedTuple):
    """Holds what the methods differ in.

    Attributes:
        score: scores slots.
        rule: says how many competing slots each head keeps.
        max_length: the slots that a head can come to hold, as in Policy.
        window: W, the number of newest queries that are kept for `score`.
        attention: what `rule` may look at as the window's attention; None if scores are that.
        kept: the most that `rule` returns.
        sink: the number of protected slots at the front, the merged one not counted.
        recent: the number of protected newest slots; None is W.
        period: the new tokens of a row between compressions; 0 compresses after the prompt alone.
        merge: whether what is dropped is merged into a slot behind the sinks.
        patience: the compressions for which the `period` best losers of a head wait: they are not
            read, but can be taken in again.
        tracking: how numbers per slot are kept up to date; None if there are none.
        calibrates: whether `rule` keeps temperatures.
    """

    score: ScoreFn
    rule: CountFn
    max_length: MaxLengthFn
    window: int
    attention: ScoreFn | None = None
    kept: int = MAX_SLOTS
    sink: int = 0
    recent: int | None = None
    period: int = 0
    merge: bool = False
    patience: int = 0
    tracking: Tracking | None = None
    calibrates: bool = False

    @property
    def first(self) -> int:
        """The number of protected slots at the front."""
        return self.sink + self.merge

    @property
    def newest(self) -> int:
        """The number of protected newest slots."""
        return self.window if self.recent is None else self.recent


def evicting(settings: Settings) -> Policy:
    """Builds a policy that drops what scores least and attends to all that is left."""
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        prefill=partial(prefill, settings),
        update=partial(update, settings),
        services=Services(partial(maintain, settings), settings.period),
        eviction=Eviction(partial(after_prompt, settings), settings.max_length),
        stats=lambda layer: "token_logits" if settings.tracking else None,
        window=settings.window,
        needs=("bias",) if settings.merge else (),
    )


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns, for each layer, queries and numbers of 0."""
    heads = spec.batch, spec.num_kv_heads
    slots = *heads, spec.capacity
    queries = spec.batch, settings.window, spec.num_heads, spec.head_dim
    return tuple(
        EvictionState(
            jnp.zeros(queries, spec.dtype),
            jnp.zeros(slots, jnp.float32) if settings.tracking else None,
            jnp.zeros(heads, jnp.float32) if settings.calibrates else None,
            jnp.zeros(slots, jnp.uint8) if settings.patience else None,
        )
        for _ in range(spec.num_layers)
    )


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Keeps the prompt's last queries, and begin to track."""
    if not view.last:
        return state
    held = view.step.layers[layer]
    positions = held.lengths[:, 0]
    entry = jax.tree.map(jnp.zeros_like, state[layer])
    entry = entry._replace(ring=as_ring(view.q_window, positions).astype(entry.ring.dtype))
    if settings.tracking:
        seen = LayerView(held, competing_in(settings, held), entry.ring, positions, entry.tracked)
        entry = entry._replace(tracked=settings.tracking.begin(seen))
    return at_layer(state, layer, entry)


def after_prompt(
    settings: Settings, state: State, view: StepView, slots: int
) -> tuple[State, KVCache]:
    """Compresses the prompt, and leave each head room for `slots` slots."""
    cache = view.cache
    # layer by layer, so that no more than one layer is ever there twice
    for layer, entry in enumerate(state):
        entry, held = compress_alone(settings, entry, cache.layers[layer], cache.positions)
        held = cut_pages(held, -(-slots // held.page_size))
        numbers = entry.tracked, entry.missed
        tracked, missed = (x if x is None else x[..., : held.capacity] for x in numbers)
        entry = entry._replace(tracked=tracked, missed=missed)
        state, cache = at_layer(state, layer, entry), replace_layer(cache, layer, held)
    return state, cache


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Attends to all that is held and does not wait; keep the query for the next compression."""
    held, entry = view.layers[layer], state[layer]
    if settings.period:
        row, at = jnp.arange(q.shape[0]), view.positions % settings.window
        ring = entry.ring.at[row, at].set(q.astype(entry.ring.dtype))
        state = at_layer(state, layer, entry._replace(ring=ring))
    return _not_waiting(held, entry.missed), None, state


def update(settings: Settings, state: State, layer: int, stats, view: StepView) -> State:
    """Brings the tracked numbers up to date."""
    if settings.tracking is None:
        return state
    shares = jnp.exp(stats.scores - stats.lse[..., None])
    lengths = view.layers[layer].lengths
    moved = settings.tracking.step(state[layer].tracked, shares, lengths, view.positions)
    return at_layer(state, layer, state[layer]._replace(tracked=moved))


def maintain(settings: Settings, state: State, view: StepView) -> tuple[State, KVCache]:
    """Compresses every layer."""
    cache = view.cache
    for layer, entry in enumerate(state):
        entry, held = compress(settings, entry, cache.layers[layer], cache.positions)
        state, cache = at_layer(state, layer, entry), replace_layer(cache, layer, held)
    return state, cache


def compress(
    settings: Settings, entry: EvictionState, held: LayerCache, positions: Rows
) -> tuple[EvictionState, LayerCache]:
    """Drops the slots of a layer that score least, and move the rest up."""
    competing = competing_in(settings, held)
    view = LayerView(held, competing, entry.ring, positions, entry.tracked)
    scores = settings.score(view)

    def attended() -> Float32[Array, "B K S"]:
        return settings.attention(view) if settings.attention else scores

    wanted, temperatures = settings.rule(scores, competing, entry.temperatures, attended)
    scores = jnp.where(competing, scores, -jnp.inf)
    chosen, missed = best(scores, wanted, settings.kept), entry.missed
    if missed is not None:
        lost, period = ~_marked(chosen, held) & (missed < settings.patience), settings.period
        waiting = best(jnp.where(lost, scores, -jnp.inf), jnp.full_like(wanted, period), period)
        missed = jnp.where(_marked(waiting, held) & competing, missed + 1, 0).astype(jnp.uint8)
        chosen = union(chosen, waiting, held.capacity)
    keep = _between(chosen, competing, held, settings.first, settings.newest)
    if settings.merge:
        dropped = competing & ~_marked(chosen, held)
        query = mean_query(entry.ring, positions, held.lengths.shape[1])
        compacted = _merging(held, keep, dropped, query, settings.sink)
    else:
        compacted = compact_pages(held, keep)
    tracked, missed = (x if x is None else _moved(x, keep) for x in (entry.tracked, missed))
    return EvictionState(entry.ring, tracked, temperatures, missed), compacted


compress_alone = jax.jit(compress, static_argnums=0, donate_argnums=(1, 2))


def competing_in(settings: Settings, held: LayerCache) -> Bool[Array, "B K S"]:
    """Marks the slots that compete: neither the first, which are protected, nor the newest."""
    slots = jnp.arange(held.capacity, dtype=jnp.int32)
    return (slots >= settings.first) & (slots < held.lengths[..., None] - settings.newest)


def best(scores: Float32[Array, "B K S"], wanted: Lengths, max_length: int) -> Selection:
    """Lists the `wanted` ≤ `max_length` best slots of each head, as tokens, never one of -inf."""
    scores = jnp.where((wanted > 0)[..., None], scores, -jnp.inf)
    capacity = max(min(max_length, scores.shape[-1]), 1)
    return threshold_select(scores[:, :, None], TopK(wanted), capacity=capacity, weights="raw")


def _between(
    chosen: Selection, competing: Bool[Array, "B K S"], held: LayerCache, first: int, newest: int
) -> Selection:
    """Lists a head's protected slots and, between them, those chosen of the competing ones."""
    nth = jnp.arange(min(first + chosen.ids.shape[-1] + newest, held.capacity), dtype=jnp.int32)
    dropped = jnp.sum(competing, -1, dtype=jnp.int32) - chosen.count
    behind = first + chosen.count[..., None]
    at = jnp.clip(nth - first, 0, chosen.ids.shape[-1] - 1)
    inside = jnp.take_along_axis(chosen.ids, jnp.broadcast_to(at, (*behind.shape[:2], nth.size)), 2)
    ids = jnp.where(nth < first, nth, jnp.where(nth < behind, inside, nth + dropped[..., None]))
    count = held.lengths - dropped
    ids = jnp.where(nth < count[..., None], ids, 0)
    return Selection(ids, count, granularity="token")


def _merging(
    held: LayerCache,
    keep: Selection,
    dropped: Bool[Array, "B K S"],
    query: Float32[Array, "B K H"],
    slot: int,
) -> LayerCache:
    """Merges what is dropped into one slot, and move what is kept."""
    slots = jnp.arange(held.capacity, dtype=jnp.int32)
    merged = merged_slot(held, dropped | (slots == slot), query)
    # all that is dropped is read before anything moves, or XLA would move a copy
    held, keep, merged = jax.lax.optimization_barrier((held, keep, merged))
    return put_slot(compact_pages(held, keep), slot, merged, keep.count < held.lengths)


def _not_waiting(held: LayerCache, missed: UInt8[Array, "B K S"] | None) -> Selection:
    """Selects everything but the slots that wait."""
    if missed is None:
        return everything(held.lengths)
    there = jnp.arange(held.capacity, dtype=jnp.int32) < held.lengths[..., None]
    pages = held.page_size <= MAX_BITS_PAGE
    return from_token_mask(
        there & (missed == 0),
        held.num_pages if pages else held.capacity,
        page_size=held.page_size,
        granularity="page" if pages else "token",
    )


def _marked(chosen: Selection, held: LayerCache) -> Bool[Array, "B K S"]:
    """Marks the slots that are listed, and perhaps the newest, which does not compete."""
    return token_mask(chosen, held.lengths, num_pages=held.num_pages, page_size=held.page_size)


def _moved(numbers: Array, keep: Selection) -> Array:
    """Moves numbers per slot as compact_pages moves rows; behind what is kept they are 0."""
    nth = jnp.arange(keep.ids.shape[-1], dtype=jnp.int32)
    moved = jnp.take_along_axis(numbers, keep.ids, axis=-1)
    moved = jnp.where(nth < keep.count[..., None], moved, 0)
    return jnp.zeros_like(numbers).at[..., : nth.size].set(moved)
