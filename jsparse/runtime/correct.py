"""Corrects the cache: recomputes the newest tokens densely and overwrites their K and V."""

import jax.numpy as jnp
from jaxtyping import Array

from jsparse.cache import NOTHING, KVCache, ReadOnly, replace_layer, step_view, without_host, write
from jsparse.hooks import State
from jsparse.models.transformer import Decoder, Weights, hidden_states
from jsparse.policy import Policy
from jsparse.runtime.chunk_attention import attend_chunk
from jsparse.runtime.compilation import note_trace, program
from jsparse.shapes import Tokens


@program(static_argnames=("decoder", "policy"), donate_argnames=("cache", "state"))
def correct(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens,
    cache: KVCache,
    state: State,
    beside: ReadOnly = NOTHING,
) -> tuple[KVCache, State]:
    """Recomputes the newest T tokens of each row densely and overwrites their K and V.

    The policy's state appends them once more. Sparse decoding lets errors build up in K and V; this
    removes them (LycheeDecode's cache correction). `tokens` are the T newest whose K and V the
    cache holds. Rows that ran out of room stay as they are.
    """
    note_trace()
    count = tokens.shape[1]
    valid = jnp.where(cache.overflow, 0, count)
    first = cache.positions - valid
    view = step_view(cache, beside)._replace(active=valid > 0)
    # as positions stood before the first of these tokens
    cache = view.cache._replace(positions=first)
    positions = first[:, None] + jnp.arange(count, dtype=jnp.int32)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal cache, state
        held = cache.layers[layer]
        held = write(held, k, v, positions, valid, held.lengths - valid[:, None])
        cache = replace_layer(cache, layer, held)
        o = attend_chunk(q, k, v, held, valid)
        now = view._replace(cache=cache)
        state = policy.append(state, layer, k, v, tokens, positions, now)
        return o

    hidden_states(decoder, weights, tokens, positions, attend)
    return without_host(cache)._replace(positions=first + valid), state
