"""RazorAttention keeps a few heads dense; the others replace their middle tokens by one mean token.

A head that is not a retrieval head attends to the sinks, to a window at the end of the prompt, and
to a *compensation token* for the N_d tokens between them, the set D. Its key and value are their
means (after RoPE), and it counts N_d times:

    k̂ = mean of k_m over D,  v̂ = mean of v_m over D
    o = (N_d exp(q·k̂ / √H) v̂ + Σ exp(q·k_n / √H) v_n) / (N_d exp(q·k̂ / √H) + Σ exp(q·k_n / √H))

with sums over the attended tokens n (equations 4 and 5).

Paper: "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (Tang et al.),
arXiv:2407.15891. `jsparse calibrate-heads` finds the heads as the paper does
(jsparse.evaluation.head_calibration).

Where we differ: the tokens of D stay in the cache, unread, so steps read less but memory is not
saved. Evicting them would not save any, since sessions and engines allocate equally many pages to
each head of a row, and retrieval heads need them all. `offloaded(razor_attention(…))` saves the
device's memory, which then holds only the retrieval heads' caches and the newest tokens. The window
does not move while decoding, and all new tokens are attended to; the paper leaves this open. Heads
are KV heads.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import CacheSpec, LayerCache, StepView, read_heads
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import number_in, whole_number
from jsparse.policies.combinators import retrieval_heads
from jsparse.policies.lfps import wanted
from jsparse.policy import Policy, at_layer
from jsparse.selection import MAX_BITS_PAGE, window
from jsparse.selection.partials import Summary
from jsparse.shapes import Queries


class Settings(NamedTuple):
    """The hyper-parameters of heads that are not retrieval heads; see `razor_attention`."""

    sink: int
    recent: int
    share: float


class CompensationToken(NamedTuple):
    """A layer's compensation tokens; rows own them.

    Attributes:
        number: N_d, the number of tokens that each represents; they begin after the sinks.
        key, value: k̂ and v̂; 0 without tokens.
    """

    number: Int32[Array, "B K"]
    key: Float32[Array, "B K H"]
    value: Float32[Array, "B K H"]


@builder
def razor_attention(gates, sink: int = 4, recent: int = 4000, share: float = 0.2) -> Policy:
    """Attends to everything in retrieval heads; the others compress the middle of the prompt.

    The other heads attend to the first `sink` tokens, to the last max(recent, share · N) tokens of
    a prompt of N tokens, to all new tokens, and to the mean of the rest.

    Args:
        gates: the retrieval heads: a name that ships with jsparse, a file written by `jsparse
            calibrate-heads` or `jsparse train-gates` (read once per process), or the mask [L, K]
            itself.
        sink: the number of first tokens that the other heads attend to; the paper's N₀.
        recent: the minimum number of last prompt tokens that they attend to; the paper's S₀.
        share: the minimum share of the prompt's tokens in that window; the paper's 1 / C.
    """
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 1)
    number_in("share", share, "[0, 1]")
    settings = Settings(sink, recent, share)
    compressed = Policy(
        partial(select, settings),
        init=init,
        prefill=partial(prefill, settings),
        shares="keys",
        reads=0,
    )
    return retrieval_heads(compressed, gates)


def init(spec: CacheSpec) -> State:
    """Returns compensation tokens that represent nothing."""
    heads = spec.batch, spec.num_kv_heads
    return tuple(
        CompensationToken(
            jnp.zeros(heads, jnp.int32),
            *(jnp.zeros((*heads, spec.head_dim), jnp.float32) for _ in range(2)),
        )
        for _ in range(spec.num_layers)
    )


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Computes the compensation tokens at the end of the prompt."""
    if not view.last:
        return state
    return at_layer(state, layer, compensation(settings, view.step.layers[layer]))


def compensation(settings: Settings, kv: LayerCache) -> CompensationToken:
    """Returns the means over the tokens between the sinks and the window (equation 4)."""
    buffer = jnp.maximum(settings.recent, wanted(settings.share, kv.lengths))
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    dropped = (slots >= settings.sink) & (slots < (kv.lengths - buffer)[..., None])
    number = jnp.sum(dropped, axis=-1, dtype=jnp.int32)

    def mean(rows: Float[Array, "B K S H"]) -> Float32[Array, "B K H"]:
        total = jnp.sum(jnp.where(dropped[..., None], rows.astype(jnp.float32), 0.0), axis=2)
        return total / jnp.maximum(number, 1)[..., None]

    return CompensationToken(number, mean(read_heads(kv.k, kv)), mean(read_heads(kv.v, kv)))


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Selects all tokens but those represented, which the summary adds (equation 5)."""
    kv, token = view.layers[layer], state[layer]
    chosen = window(
        kv.lengths,
        sink=settings.sink,
        recent=jnp.maximum(kv.lengths - settings.sink - token.number, 0),
        num_pages=kv.num_pages,
        page_size=kv.page_size,
        granularity="page" if kv.page_size <= MAX_BITS_PAGE else "token",
    )
    grouped = q.reshape(*kv.lengths.shape, -1, q.shape[-1]).astype(jnp.float32)
    # elementwise products: a matrix product would round the key to q's precision on a GPU
    logits = q.shape[-1] ** -0.5 * jnp.sum(grouped * token.key[:, :, None], axis=-1)
    lse = logits + jnp.log(token.number.astype(jnp.float32))[..., None]  # -inf without tokens
    value = jnp.broadcast_to(token.value[:, :, None], grouped.shape)
    read = jnp.minimum(token.number, 1)
    return chosen, Summary(value.reshape(q.shape), lse.reshape(q.shape[:2]), read, read), state
