"""Policies that each break one rule of the contract, named after that rule."""

import jax.numpy as jnp

from jsparse.extend import (
    Policy,
    Selection,
    Summary,
    at_layer,
    builder,
    everything,
    page_policy,
    read_heads,
    taking_part,
)


def newest(view, layer, tokens):
    """Each head's newest tokens, at most 16; `tokens` may be one number per row."""
    lengths = view.layers[layer].lengths
    count = jnp.minimum(lengths, jnp.reshape(jnp.clip(jnp.asarray(tokens), 1, 16), (-1, 1)))
    nth = jnp.arange(16, dtype=jnp.int32)
    ids = jnp.where(nth < count[..., None], (lengths - count)[..., None] + nth, 0)
    return Selection(ids, count, granularity="token"), None


def counters(spec, dtype=jnp.int32):
    return tuple(jnp.zeros(spec.batch, dtype) for _ in range(spec.num_layers))


@builder
def types() -> Policy:
    """Counts tokens in another dtype than init."""

    def append(state, layer, k, v, tokens, positions, view):
        return at_layer(state, layer, state[layer] + 0.5)

    def select(state, layer, q, view):
        return *newest(view, layer, 5), state

    return Policy(select, init=counters, append=append)


@builder
def runs() -> Policy:
    """Branches on a value."""

    def select(state, layer, q, view):
        if view.layers[layer].lengths.max() > 8:
            return *newest(view, layer, 5), state
        return everything(view.layers[layer].lengths), None, state

    return Policy(select)


@builder
def owners() -> Policy:
    """Keeps one number for all rows."""

    def init(spec):
        return tuple(jnp.zeros((), jnp.int32) for _ in range(spec.num_layers))

    def select(state, layer, q, view):
        return *newest(view, layer, 5), state

    return Policy(select, init=init)


@builder
def selections() -> Policy:
    """Lists the newest page first."""

    def select(state, layer, q, view):
        held = view.layers[layer]
        used = -(-held.lengths // held.page_size)
        count = jnp.minimum(used, 2)
        nth = jnp.arange(2, dtype=jnp.int32)
        ids = jnp.where(nth < count[..., None], used[..., None] - 1 - nth, 0)
        return Selection(ids, count), None, state

    return Policy(select)


@builder
def finite() -> Policy:
    """Replaces the tokens before the newest 16 by their mean; there may be none."""

    def select(state, layer, q, view):
        held = view.layers[layer]
        left = jnp.maximum(held.lengths - 16, 0)
        nth = jnp.arange(held.capacity, dtype=jnp.int32)
        there = (nth < left[..., None])[..., None]
        values = jnp.sum(jnp.where(there, read_heads(held.v, held), 0), axis=2)
        group = q.shape[1] // left.shape[1]
        mean = jnp.repeat(values / left[..., None], group, axis=1)
        return newest(view, layer, 16)[0], Summary(mean, jnp.zeros(q.shape[:2])), state

    return Policy(select)


@builder
def rows() -> Policy:
    """Attends to more if the rows hold more on average."""

    def select(state, layer, q, view):
        return *newest(view, layer, view.layers[layer].lengths.max() // 4), state

    return Policy(select)


@builder
def alone() -> Policy:
    """Divides a budget among the rows."""

    def select(state, layer, q, view):
        return *newest(view, layer, 16 // q.shape[0]), state

    return Policy(select)


@builder
def pieces() -> Policy:
    """Counts chunks instead of tokens."""

    def prefill(state, layer, view):
        return at_layer(state, layer, state[layer] + jnp.where(view.valid > 0, 4, 0))

    def select(state, layer, q, view):
        return *newest(view, layer, state[layer]), state

    return Policy(select, init=counters, prefill=prefill)


def page_sums(active_only, fresh):
    """Keeps the sum of the first channel of each page, with or without a reset, per row or for all
    rows.
    """

    def init(spec):
        return tuple(jnp.zeros(spec.pages, jnp.float32) for _ in range(spec.num_layers))

    def taken_in(entry, held, k, first, valid):
        nth = jnp.arange(k.shape[1], dtype=jnp.int32)
        slots = first[..., None] + nth  # [B, K, T]
        page = jnp.clip(slots // held.page_size, 0, held.num_pages - 1)
        batch, heads = held.lengths.shape
        if held.block_table is None:
            own = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1)
            at = own * held.num_pages + page
        else:
            at = jnp.take_along_axis(held.block_table, page, axis=2)
        there = nth < valid[:, None, None]
        if fresh:
            begins = jnp.where(there & (slots % held.page_size == 0), at, entry.size)
            entry = entry.at[begins].set(0.0, mode="drop")
        at = jnp.where(there, at, entry.size)
        return entry.at[at].add(jnp.abs(k[..., 0]).swapaxes(1, 2), mode="drop")

    def prefill(state, layer, view):
        held = view.step.layers[layer]
        first = held.lengths - view.valid[:, None]
        return at_layer(state, layer, taken_in(state[layer], held, view.k, first, view.valid))

    def append(state, layer, k, v, tokens, positions, view):
        held = view.layers[layer]
        valid = taking_part(view, 1) if active_only else jnp.ones(k.shape[0], jnp.int32)
        entry = taken_in(state[layer], held, k, held.lengths - valid[:, None], valid)
        return at_layer(state, layer, entry)

    def select(state, layer, q, view):
        held = view.layers[layer]
        entry = state[layer] if held.block_table is None else state[layer][held.block_table]
        sums = entry.reshape(*held.lengths.shape, held.num_pages)
        used = jnp.arange(held.num_pages) * held.page_size < held.lengths[..., None]
        best = jnp.argmax(jnp.where(used, sums, -1.0), axis=-1, keepdims=True)
        return Selection(best.astype(jnp.int32), jnp.ones_like(held.lengths)), None, state

    return Policy(select, init=init, prefill=prefill, append=append)


@builder
def pool() -> Policy:
    """Adds to the state of a page's previous owner."""
    return page_sums(active_only=True, fresh=False)


@builder
def inactive() -> Policy:
    """Counts a token for inactive rows."""
    return page_sums(active_only=False, fresh=True)


@builder
def retrace() -> Policy:
    """Takes its dtype from the first number."""

    def init(spec):
        return tuple(jnp.full(spec.batch, 0.0) for _ in range(spec.num_layers))

    def append(state, layer, k, v, tokens, positions, view):
        return at_layer(state, layer, state[layer] + jnp.ones(k.shape[0], jnp.float32))

    def select(state, layer, q, view):
        return *newest(view, layer, 5), state

    return Policy(select, init=init, append=append)


@builder
def budget(budget: int = 1024) -> Policy:
    """Leaves out pages of negative score, at any budget."""

    def score(q, key):
        logit = (q @ key).max()
        return jnp.where(logit > 0, logit, -jnp.inf)

    def mean_key(keys, held):
        return jnp.mean(keys, axis=0, where=held[:, None])

    return page_policy(mean_key, score, budget)


@builder
def mass() -> Policy:
    """Attends to the first page, for any query."""

    def select(state, layer, q, view):
        count = jnp.ones_like(view.layers[layer].lengths)
        return Selection(jnp.zeros((*count.shape, 1), jnp.int32), count), None, state

    return Policy(select)
