"""Measures the distance between the model with gated heads and the dense model, by distillation.

LycheeDecode (arXiv:2602.04541), section 3.2. The context is prefilled once, densely. The tokens
after it, whose predictions are compared, then run twice over its K and V: densely, as teacher, and
with every KV head a mixture
    z · (attention over everything) + (1 - z) · (attention over the set inherited from the layer
    above)
of its two possible roles. A head selects the best `keep` of a token's context, by the logits of its
group's mean query, for the head with its index in the next layer. With "handed_on" sets, a head
with a gate below one half passes on its inherited set instead, as a sparse head does in decoding.
With "refreshed" sets, every head selects, as in the paper's training. With "streaming" sets,
nothing is selected or inherited: sparse heads attend to the first and newest tokens, as those of
DuoAttention (arXiv:2410.10819, section 2.2). Only these tokens' rows of attention are ever
materialised, and the backward pass recomputes them.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse import cache as kv_cache
from jsparse.builder import dense
from jsparse.cache import CacheSpec, read_heads
from jsparse.models.transformer import Decoder, Weights, hidden_states, to_logits
from jsparse.runtime import chunk_attention, prefill
from jsparse.selection.threshold import top_k_mask
from jsparse.shapes import Rows, Tokens
from jsparse.train.data import TrainingBatch

Match = Literal["logits", "hidden"]
Sets = Literal["handed_on", "refreshed", "streaming"]
KV = tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]
# the first and newest tokens that sparse heads attend to with "streaming" sets
SINK, RECENT = 64, 256


class TeacherCache(NamedTuple):
    """Outputs of the dense model for a batch, independent of the gates.

    Attributes:
        context: K and V of all tokens before the first of `tokens`, per layer.
        context_lengths: the number of valid context tokens.
        tokens: the context's last token and all targets but the last, which predict the targets.
        outputs: the dense model's outputs for them.
        scored: marks the tokens in the loss.
    """

    context: tuple[KV, ...]
    context_lengths: Rows
    tokens: Tokens
    outputs: Float32[Array, "B T out"]
    scored: Bool[Array, "B T"]


def teacher_cache(
    decoder: Decoder, weights: Weights, batch: TrainingBatch, match: Match
) -> TeacherCache:
    """Prefills the context and predicts the targets with the dense model."""
    context, length, target, scored = map(jnp.asarray, batch)
    context_lengths = length - 1
    last = jnp.take_along_axis(context, context_lengths[:, None], axis=1)
    tokens = jnp.concatenate([last, target[:, :-1]], axis=1)
    lesson = TeacherCache(
        read_context(decoder, weights, context, context_lengths),
        context_lengths,
        tokens,
        jnp.zeros(0),
        scored,
    )
    return lesson._replace(outputs=predictions(decoder, weights, lesson, None, match=match))


def read_context(
    decoder: Decoder, weights: Weights, context: Tokens, context_lengths: Rows
) -> tuple[KV, ...]:
    """Returns K and V of the first `context_lengths` tokens, from the engine's own prefill."""
    config, (rows, size) = decoder.config, context.shape
    shape = (config.num_layers, rows, config.num_heads, config.num_kv_heads, config.head_dim)
    spec = CacheSpec(*shape, page_size=16, num_pages=-(-size // 16), dtype=decoder.dtype)
    carry = prefill.start(decoder, dense(), kv_cache.init(spec), ())
    given = decoder, dense(), weights, context, context_lengths, carry
    carry = prefill.prefill_prompts(*given, chunk=chunk_attention.chunk_tokens(spec), within=True)
    return tuple((read_heads(kv.k, kv), read_heads(kv.v, kv)) for kv in carry.cache.layers)


def predictions(
    decoder: Decoder,
    weights: Weights,
    lesson: TeacherCache,
    gates: Float[Array, "L K"] | None,
    *,
    match: Match,
    keep: float = 1.0,
    sets: Sets = "handed_on",
) -> Float32[Array, "B T out"]:
    """Returns logits or hidden states of the lesson's tokens; gates None: the dense model."""
    steps = jnp.arange(lesson.tokens.shape[1], dtype=jnp.int32)
    streams, inherited = sets == "streaming", None
    if streams:
        shape = lesson.context[0][0].shape
        inherited = window(lesson.context_lengths, len(steps), shape[2] + len(steps))
        inherited = jnp.broadcast_to(inherited[:, None], (*shape[:2], *inherited.shape[1:]))

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal inherited
        own = tuple(x.swapaxes(1, 2) for x in (k, v))
        joined = tuple(
            jnp.concatenate(pair, axis=2) for pair in zip(lesson.context[layer], own, strict=True)
        )
        if gates is None:
            return attention(q, *joined, lesson.context_lengths, None, None, None)[0]
        # the first layer inherits nothing, and no layer inherits from the last
        picks = keep if layer + 1 < gates.shape[0] and not streams else None
        z = None if inherited is None else gates[layer]
        o, picked = attention(q, *joined, lesson.context_lengths, z, inherited, picks)
        if streams:
            return o
        if sets == "handed_on" and inherited is not None and picked is not None:
            picked = jnp.where(gates[layer][:, None, None] < 0.5, inherited, picked)
        inherited = picked
        return o

    hidden = hidden_states(
        decoder, weights, lesson.tokens, lesson.context_lengths[:, None] + steps, attend
    )
    return hidden.astype(jnp.float32) if match == "hidden" else to_logits(decoder, weights, hidden)


@partial(jax.checkpoint, static_argnums=(6,))
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K slots H"],
    v: Float[Array, "B K slots H"],
    context_lengths: Rows,
    z: Float[Array, "K"] | None,
    inherited: Bool[Array, "B K T slots"] | None,
    keep: float | None,
) -> tuple[Float[Array, "B T N H"], Bool[Array, "B K T slots"] | None]:
    """Returns a layer's mixture, and the set that it passes on: the best `keep` and a token itself.

    The last T slots are the tokens' own; of those before, `context_lengths` are valid.
    """
    batch, tokens, heads, head_dim = q.shape
    age = ages(context_lengths, tokens, k.shape[2])
    seen, own = age >= 0, age == 0
    grouped = q.reshape(batch, tokens, k.shape[1], -1, head_dim)
    logits = (
        jnp.einsum("btkgh,bksh->bkgts", grouped, k, preferred_element_type=jnp.float32)
        * head_dim**-0.5
    )
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf))
    if z is not None and inherited is not None:
        sparse = jax.nn.softmax(jnp.where(inherited[:, :, None], logits, -jnp.inf))
        z = z[:, None, None, None]
        weights = z * weights + (1 - z) * sparse
    o = jnp.einsum(
        "bkgts,bksh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    o = o.reshape(batch, tokens, heads, head_dim)
    if keep is None:
        return o, None
    mean = jnp.where(seen[:, None], jax.lax.stop_gradient(jnp.mean(logits, axis=2)), -jnp.inf)
    count = jnp.ceil(keep * jnp.sum(seen, axis=-1)).astype(jnp.int32)
    return o, top_k_mask(mean, count[:, None]) | own[:, None]


def ages(context_lengths: Rows, tokens: int, slots: int) -> Int32[Array, "B T slots"]:
    """Returns how many tokens before each new token a slot's token is; negative: it is not seen.

    The last `tokens` slots are the new tokens' own; of those before, `context_lengths` are valid.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)
    step = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    own = slot - (slots - tokens)  # index of the token in a slot, negative in the context
    lengths = context_lengths[:, None, None]
    in_context = jnp.where(slot < lengths, lengths + step - slot, -1)
    return jnp.where(own < 0, in_context, step - own)


def window(context_lengths: Rows, tokens: int, slots: int) -> Bool[Array, "B T slots"]:
    """Marks the first SINK tokens and the newest RECENT, including the new token itself."""
    age = ages(context_lengths, tokens, slots)
    newest = context_lengths[:, None, None] + jnp.arange(tokens, dtype=jnp.int32)[:, None]
    return (age >= 0) & ((age < RECENT) | (newest - age < SINK))


def distance(outputs: Float32[Array, "B T out"], lesson: TeacherCache) -> Float32[Array, ""]:
    """Returns the squared difference to the teacher over its variance, at scored tokens."""
    scored = lesson.scored[..., None]
    count = jnp.maximum(jnp.sum(lesson.scored, axis=1), 1) * outputs.shape[-1]

    def mean(x: Array) -> Array:
        return jnp.sum(jnp.where(scored, x, 0.0), axis=(1, 2)) / count

    centre = mean(lesson.outputs)[:, None, None]
    return jnp.mean(mean((outputs - lesson.outputs) ** 2) / mean((lesson.outputs - centre) ** 2))
