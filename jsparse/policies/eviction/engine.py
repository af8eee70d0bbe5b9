"""Compresses a cache: scores the slots of each KV head, drops the worst and closes the gaps.

A head's slots are, in order: the first few, which are protected (sinks, then the merged slot, if
any), the competing slots, and the newest, which are also protected. A compression keeps the best
competing slots. It runs once after the prompt and then every `period` tokens of a row. In between,
all remaining slots are attended to.

The merged slot represents all tokens that a head ever dropped (`merging`). The first token to be
merged is the one already in that slot, which changes nothing while it is alone.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jsparse.cache import CacheSpec, KVCache, StepView, cut_pages, replace_layer
from jsparse.hooks import PrefillView, State
from jsparse.policies.eviction.compression import competing_in, compress, not_waiting
from jsparse.policies.eviction.settings import EvictionState, LayerView, Settings
from jsparse.policies.eviction.window import as_ring
from jsparse.policy import Eviction, Policy, Services, at_layer
from jsparse.shapes import Queries


def evicting(settings: Settings) -> Policy:
    """Builds a policy that drops the slots with the lowest scores and attends to all others."""
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        prefill=partial(prefill, settings),
        update=partial(update, settings),
        services=Services(partial(maintain, settings), settings.period),
        eviction=Eviction(partial(after_prompt, settings), settings.max_length, settings.reread),
        stats=lambda layer: "token_logits" if settings.tracking else None,
        window=settings.window,
        shares="pages",
        needs=(*settings.needs, *(("bias",) if settings.merge else ())),
    )


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns, for each layer, queries and per-slot numbers of 0."""
    heads = spec.batch, spec.num_kv_heads
    slots = *heads, spec.capacity
    # XLA crashes on empty arrays in programs of several devices
    queries = spec.batch, max(settings.window, 1), spec.num_heads, spec.head_dim
    return tuple(
        EvictionState(
            jnp.zeros(queries, spec.dtype),
            jnp.zeros(slots, jnp.float32) if settings.tracks else None,
            jnp.zeros(heads, jnp.float32) if settings.calibrates else None,
            jnp.zeros(slots, jnp.uint8) if settings.patience else None,
        )
        for _ in range(spec.num_layers)
    )


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Stores the prompt's last queries, and starts tracking."""
    if not view.last:
        return state
    kv = view.step.layers[layer]
    positions = kv.lengths[:, 0]
    entry = jax.tree.map(jnp.zeros_like, state[layer])
    if settings.window:
        entry = entry._replace(ring=as_ring(view.q_window, positions).astype(entry.ring.dtype))
    if settings.tracking:
        seen = LayerView(kv, competing_in(settings, kv), entry.ring, positions, entry.tracked)
        entry = entry._replace(tracked=settings.tracking.begin(seen))
    return at_layer(state, layer, entry)


def after_prompt(
    settings: Settings, state: State, view: StepView, slots: int
) -> tuple[State, KVCache]:
    """Compresses the prompt, and leaves each head room for `slots` slots."""
    cache = view.cache
    # layer by layer, so that at most one layer exists twice at a time
    for layer, entry in enumerate(state):
        seen = cache.layers[layer], cache.positions, view.constants
        entry, kv = compress_alone(settings, entry, *seen)
        kv = cut_pages(kv, -(-slots // kv.page_size))
        numbers = entry.tracked, entry.missed
        tracked, missed = (x if x is None else x[..., : kv.capacity] for x in numbers)
        entry = entry._replace(tracked=tracked, missed=missed)
        state, cache = at_layer(state, layer, entry), replace_layer(cache, layer, kv)
    return state, cache


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Attends to all slots that do not wait; stores the query for the next compression."""
    kv, entry = view.layers[layer], state[layer]
    if settings.period:
        row, at = jnp.arange(q.shape[0]), view.positions % settings.window
        ring = entry.ring.at[row, at].set(q.astype(entry.ring.dtype))
        state = at_layer(state, layer, entry._replace(ring=ring))
    return not_waiting(kv, entry.missed), None, state


def update(settings: Settings, state: State, layer: int, stats, view: StepView) -> State:
    """Updates the tracked numbers."""
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
        seen = cache.layers[layer], cache.positions, view.constants
        entry, kv = compress(settings, entry, *seen)
        state, cache = at_layer(state, layer, entry), replace_layer(cache, layer, kv)
    return state, cache


compress_alone = jax.jit(compress, static_argnums=0, donate_argnums=(1, 2))
