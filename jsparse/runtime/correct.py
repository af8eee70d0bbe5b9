"""Recomputes the newest tokens densely and overwrites their K and V."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.cache import (
    NOTHING,
    KVCache,
    ReadOnly,
    replace_layer,
    step_view,
    without_borrowed,
)
from jsparse.heads import Heads
from jsparse.hooks import State
from jsparse.models.transformer import Decoder, Weights, hidden_states
from jsparse.pallas_kernels.rope_append import rope_append
from jsparse.policy import Policy, kept
from jsparse.runtime.chunk_attention import attend_chunk
from jsparse.runtime.compilation import note_trace, program
from jsparse.selection.partials import ListedLogits, Stats
from jsparse.shapes import ChunkKV, ChunkQueries, Rows, Tokens


@program(static_argnames=("decoder", "policy"), donate_argnames=("cache", "state"))
def correct(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens,
    cache: KVCache,
    state: State,
    read_only: ReadOnly = NOTHING,
) -> tuple[KVCache, State]:
    """Recomputes the newest T tokens of each row densely and overwrites their K and V.

    The policy's state appends them again. Sparse decoding lets errors accumulate in K and V; this
    removes them (LycheeDecode's cache correction). `tokens` are the T newest whose K and V are in
    the cache. Rows that ran out of room do not change.
    """
    note_trace()
    valid = jnp.where(cache.overflow, 0, tokens.shape[1])

    def attend(*chunk: Any) -> tuple[ChunkQueries, None]:
        return attend_chunk(*chunk), None

    _, cache, state = recomputed(
        decoder, policy, weights, tokens, valid, cache, state, read_only, attend
    )
    return cache, state


def recomputed(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens,
    valid: Rows,
    cache: KVCache,
    state: State,
    read_only: ReadOnly,
    attend_new: Callable[..., tuple[ChunkQueries, Stats | ListedLogits | None]],
) -> tuple[Float[Array, "B T D"], KVCache, State]:
    """Runs the newest tokens of each row through the model again, as one dense chunk.

    To the model each token is a row of its own, so that it runs the kernels of a decode step.

    Args:
        decoder: the model's definition.
        policy: the method; its state appends the tokens again.
        weights: the model's weights.
        tokens: T tokens of each row; the first `valid[b]` are the newest in the cache.
        valid: the number of these tokens, per row.
        cache: K and V; those of these tokens are overwritten, whatever their values.
        state: the method's state.
        read_only: the inputs besides the weights.
        attend_new: attention of new tokens, as `attend_chunk`, with its report for the method's
            `checked`, if any.

    Returns:
        The hidden states of the tokens, the cache and the state.
    """
    chunk, checked, reports = tokens.shape, policy.services.checked, []
    end, first = cache.positions, cache.positions - valid
    view = step_view(cache, read_only)._replace(valid=valid)
    # positions before the first of these tokens
    cache = view.cache._replace(positions=first)
    positions = first[:, None] + jnp.arange(chunk[1], dtype=jnp.int32)

    def rotate(layer: int, heads: Heads) -> tuple[ChunkQueries, ChunkKV, ChunkKV]:
        nonlocal cache
        *parts, _, _, number, head_dim = heads.qkv.shape
        heads = heads._replace(
            qkv=heads.qkv.reshape(*parts, *chunk, number, head_dim),
            table=tuple(angles.reshape(*chunk, -1) for angles in heads.table),
        )
        q, k, v, kv = rope_append(heads, cache.layers[layer], positions, valid)
        cache = replace_layer(cache, layer, kv)
        return q, k, v

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal state
        kv = cache.layers[layer]
        window = decoder.config.window(layer, kv.capacity)
        o, stats = attend_new(q, k, v, kv, valid, window)
        reports.append(stats)
        state = policy.append(state, layer, k, v, tokens, positions, view._replace(cache=cache))
        return o.reshape(-1, 1, *o.shape[2:])

    rows = tokens.reshape(-1, 1), positions.reshape(-1, 1)
    hidden = hidden_states(decoder, weights, *rows, attend, rotate)
    if checked is not None and None not in reports:
        after = checked(state, tuple(reports), view._replace(cache=cache))
        state = kept(policy, "checked", state, after)
    return hidden.reshape(*chunk, -1), without_borrowed(cache)._replace(positions=end), state
