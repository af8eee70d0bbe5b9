"""Runs a decode step: make room for a token, then append, select, attend, update in each layer.

It contains no code of any one method.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jsparse.cache import (
    NOTHING,
    KVCache,
    ReadOnly,
    StepView,
    grow,
    level,
    replace_layer,
    spec_of,
    step_view,
    taken,
    without_borrowed,
)
from jsparse.heads import Heads
from jsparse.hooks import State
from jsparse.models.transformer import Decoder, Weights, hidden_states, to_logits
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.rope_append import rope_append
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.policy import Policy, kept, selected
from jsparse.ranks import across
from jsparse.runtime import host_attention
from jsparse.runtime.chunk_attention import newest
from jsparse.runtime.state_axes import keep_inactive
from jsparse.selection import Selection
from jsparse.selection.attended import count_tokens
from jsparse.selection.partials import AttentionOut, Summary, merge
from jsparse.shapes import ChunkKV, ChunkQueries, Lengths, Queries, Rows

ATTENTION = {"page": block_sparse_decode, "token": token_sparse_decode}


class StepStats(NamedTuple):
    """Means over KV heads of one step, as shares of the positions so far.

    A decode step returns them by layer, [L, B]; `over_layers` returns the means, [B].

    Attributes:
        attended: the share of tokens that attention used.
        read: the share of tokens whose K and V it read; pages with bits are read whole.
    """

    attended: Float32[Array, "*L B"]
    read: Float32[Array, "*L B"]

    def over_layers(self) -> "StepStats":
        """Returns the means over layers."""
        return StepStats(jnp.mean(self.attended, axis=0), jnp.mean(self.read, axis=0))


def decode_step(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Rows,
    cache: KVCache,
    state: State,
    read_only: ReadOnly = NOTHING,
    active: Bool[Array, "B"] | None = None,
) -> tuple[Float32[Array, "B V"], KVCache, State, StepStats]:
    """Runs one token of every row through the model.

    Args:
        decoder: the model's definition; static.
        policy: the method; static.
        weights: the model's weights.
        tokens: the newest token of each row, whose K and V are not yet in the cache.
        cache: K and V of all earlier tokens.
        state: the method's state.
        read_only: the inputs besides the weights.
        active: the rows that take part; None: all. Other rows change nothing in the cache, the
            state or the pages. Their results are finite but invalid, as are those of rows that
            overflow.

    Returns:
        The logits that follow `tokens`, the cache and state after them, and the shares attended and
        read in each layer.
    """
    view = step_view(cache if policy.evicts else level(cache), read_only)
    before, cache, positions = state, view.cache, cache.positions[:, None]
    one = jnp.ones_like(cache.positions) if active is None else active.astype(jnp.int32)
    cache = grow(cache, one, 1)
    one = taken(cache, one)
    view = view._replace(valid=one)
    counts = []

    def rotate(layer: int, heads: Heads) -> tuple[ChunkQueries, ChunkKV, ChunkKV]:
        nonlocal cache
        q, k, v, kv = rope_append(heads, cache.layers[layer], positions, one)
        cache = replace_layer(cache, layer, kv)
        return q, k, v

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal state
        now = view._replace(cache=cache)
        grown = policy.append(state, layer, k, v, tokens[:, None], positions, now)
        state = kept(policy, "append", state, grown)
        window = decoder.config.window(layer, cache.layers[layer].capacity)
        out, state, counted = attend_layer(policy, layer, q[:, 0], now, state, window)
        state = kept(policy, "update", state, policy.update(state, layer, out.stats, now))
        counts.append(counted)
        return out.o[:, None]

    hidden = hidden_states(decoder, weights, tokens[:, None], positions, attend, rotate)
    logits = to_logits(decoder, weights, hidden[:, 0])
    if active is not None:
        spec = spec_of(cache, decoder.config.num_heads)
        state = keep_inactive(policy, spec, one > 0, state, before)
    cache = without_borrowed(cache)._replace(positions=cache.positions + one)
    means = (across(jnp.mean(jnp.stack(n), axis=2), "mean") for n in zip(*counts, strict=True))
    positions = jnp.maximum(cache.positions, 1)
    return logits, cache, state, StepStats(*(jnp.where(one > 0, n / positions, 0.0) for n in means))


def attend_layer(
    policy: Policy,
    layer: int,
    q: Queries,
    view: StepView,
    state: State,
    window: int | None = None,
) -> tuple[AttentionOut, State, tuple[Lengths, Lengths]]:
    """Selects and attends in one layer; one with a window attends to it, whatever the selection.

    The last two arrays are the number of tokens that each head attended to and read.
    """
    kv = view.layers[layer]
    selection, summary, state = _select(policy, layer, q, view, state)
    if summary is not None:
        summary = _of_active(summary, view)
    selection, summary = dense_rows(policy, layer, selection, summary, view)
    if window is not None:  # `select` has run: its state may be for later layers
        selection, summary = newest(kv, window, granularity=selection.granularity), None
    dtype = q.dtype if summary is None else jnp.float32
    run = host_attention.attention(ATTENTION[selection.granularity], policy.offload)
    out = run(q, kv, selection, stats=policy.stats(layer), dtype=dtype)
    counted = count_tokens(selection, kv.lengths, kv.page_size)
    if summary is not None:
        o, lse = merge(out.o, out.lse, summary.o, summary.lse)
        out = AttentionOut(o.astype(q.dtype), lse, out.stats)
        counted = counted[0] + summary.attended, counted[1] + summary.read
    return out, state, counted


def _select(
    policy: Policy, layer: int, q: Queries, view: StepView, state: State
) -> tuple[Selection, Summary | None, State]:
    """Returns the policy's selection, or an empty one if all rows are short enough to be dense.

    Attention is the same either way, so that a row's bits do not depend on other rows.
    """

    def select(state: State) -> tuple[Selection, Summary | None, State]:
        return selected(policy, state, policy.select(state, layer, q, view))

    short = _short_rows(policy, layer, view)
    if short is None:
        return select(state)

    def nothing(state: State) -> tuple[Selection, Summary | None, State]:
        chosen, summary, _ = jax.eval_shape(select, state)
        return *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (chosen, summary)), state

    waiting = short if view.active is None else short | ~view.active
    return jax.lax.cond(jnp.all(waiting), nothing, select, state)


def _short_rows(policy: Policy, layer: int, view: StepView) -> Bool[Array, "B"] | None:
    """Returns the rows that are dense because they are short; None if no row ever is."""
    kv = view.layers[layer]
    below = policy.dense_below(kv)
    return jnp.max(kv.lengths, axis=1) < below if below else None


def _of_active(summary: Summary, view: StepView) -> Summary:
    """Drops the summaries of inactive rows, which may be empty: a mean over nothing is NaN."""
    return summary if view.active is None else _without(summary, ~view.active)


def _without(summary: Summary, rows: Bool[Array, "B"]) -> Summary:
    """Drops the summaries of some rows."""
    gone = rows[:, None]
    return Summary(
        summary.o,
        jnp.where(gone, -jnp.inf, summary.lse),
        jnp.where(gone, 0, summary.attended),
        jnp.where(gone, 0, summary.read),
    )


def dense_rows(
    policy: Policy, layer: int, selection: Selection, summary: Summary | None, view: StepView
) -> tuple[Selection, Summary | None]:
    """Makes rows dense that requested for it or are short, and drops their summaries."""
    requested, short = (view.knobs or {}).get("dense"), _short_rows(policy, layer, view)
    for rows in (requested, short):
        if rows is None:
            continue
        dense = jnp.broadcast_to(rows[:, None], selection.count.shape)
        dense = dense if selection.dense is None else dense | selection.dense
        selection = replace(selection, dense=dense)
        summary = None if summary is None else _without(summary, rows)
    return selection, summary
