"""Runs a decode step: make room for a token, then append, select, attend, update in each layer.

It names no method.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse.cache import KVCache, fill, grow
from jsparse.models.transformer import Decoder, Weights, hidden_states, to_logits
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.partials import AttentionOut, merge
from jsparse.policy import Policy, State
from jsparse.selection import count_tokens, everything
from jsparse.shapes import Lengths, Queries, Rows

ATTENTION = {"page": block_sparse_decode, "token": token_sparse_decode}


class StepStats(NamedTuple):
    """Holds means over layers and KV heads of one step, as shares of the positions so far.

    Attributes:
        attended: the share of tokens that attention used.
        read: the share of tokens whose K and V it read; pages are read whole, whatever their bits.
    """

    attended: Float32[Array, "B"]
    read: Float32[Array, "B"]


def decode_step(
    decoder: Decoder, policy: Policy, weights: Weights, tokens: Rows, cache: KVCache, state: State
) -> tuple[Float32[Array, "B V"], KVCache, State, StepStats]:
    """Runs one token of every row through the model.

    Args:
        decoder: the model's definition; static.
        policy: the method; static.
        weights: the model's weights.
        tokens: the newest token of each row, whose K and V the cache does not hold yet.
        cache: K and V of everything before.
        state: the method's state.

    Returns:
        The logits that follow `tokens`, the cache and state after them, and the shares attended and
        read.
    """
    positions = cache.positions[:, None]
    one = jnp.ones_like(cache.positions)
    counts = []
    cache = grow(cache, one, 1)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal cache, state
        cache = fill(cache, layer, k, v, positions, one)
        state = policy.append(state, layer, k, v, tokens[:, None], positions, cache)
        out, state, counted = attend_layer(policy, layer, q[:, 0], cache, state)
        state = policy.update(state, layer, out.stats, cache)
        counts.append(counted)
        return out.o[:, None]

    hidden = hidden_states(decoder, weights, tokens[:, None], positions, attend)
    logits = to_logits(decoder, weights, hidden[:, 0])
    cache = cache._replace(positions=cache.positions + 1)
    shares = StepStats(
        *(jnp.mean(jnp.stack(n), axis=(0, 2)) / cache.positions for n in zip(*counts, strict=True))
    )
    return logits, cache, state, shares


def attend_layer(
    policy: Policy, layer: int, q: Queries, cache: KVCache, state: State
) -> tuple[AttentionOut, State, tuple[Lengths, Lengths]]:
    """Selects and attends in one layer; attends densely where the policy falls back to that.

    The last two arrays are the number of tokens that each head attended to and read.
    """
    held = cache.layers[layer]

    def attend(selection, summary, state):
        dtype = q.dtype if summary is None else jnp.float32
        out = ATTENTION[selection.granularity](
            q, held, selection, stats=policy.stats(layer), dtype=dtype
        )
        if summary is not None:
            o, lse = merge(out.o, out.lse, *summary)
            out = AttentionOut(o.astype(q.dtype), lse, out.stats)
        return out, state, count_tokens(selection, held.lengths, held.page_size)

    def sparse(state):
        return attend(*policy.select(state, layer, q, cache))

    if policy.fallback is None:
        return sparse(state)
    return jax.lax.cond(
        policy.fallback(state, layer, cache),
        lambda s: attend(everything(held.lengths), None, s),
        sparse,
        state,
    )
