"""Chooses the next token of each row: greedily, by sampling, or as it is given.

A way of choosing is a static function of what it carries from token to token, the token's number
and the logits. Two serve generation: `greedy`, where all rows take the likeliest token, and
`sampled`, in which every option is a number per row, so that no value of an option compiles
anything anew. Options are named, and apply in the order, as in Hugging Face's logits processors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jsparse.request import Request
from jsparse.shapes import Rows
from jsparse.threshold import top_k_mask, top_p_mask

Chosen = tuple[Rows, Float32[Array, "B"], Any]


class ChooseFn(Protocol):
    """Choose token number `nth` of each row; return it, its log-probability and what to carry on.

    The log-probability is under the model's own softmax, before any options.
    """

    def __call__(
        self, given: Any, nth: Int32[Array, ""], logits: Float32[Array, "B V"], /
    ) -> Chosen: ...


class RowSampling(NamedTuple):
    """Holds the options of SamplingParams, one number per row.

    Attributes:
        temperature, top_k, top_p, min_p, repetition_penalty: as in SamplingParams.
        seed: the lower and the upper half of the seed.
        stream: the stream of random numbers, of those that the seed has.
        seen: the tokens in the text so far.
    """

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    repetition_penalty: Float32[Array, "B"]
    seed: UInt32[Array, "B 2"]
    stream: Int32[Array, "B"]
    seen: Bool[Array, "B V"]


def chooser(requests: Sequence[Request], vocab_size: int) -> tuple[ChooseFn, Any]:
    """Returns the way to choose for a batch, and what it carries at first."""
    options = [request.sampling for request in requests]
    if all(own.greedy for own in options):
        return greedy, ()
    seen = np.zeros((len(requests), vocab_size), np.bool_)
    for row, request in enumerate(requests):
        seen[row, request.ids] = True

    def column(name: str) -> Array:
        return jnp.asarray([getattr(own, name) for own in options], jnp.float32)

    # a key takes 32 bits of a seed: the upper ones are folded in
    seeds = [divmod(own.seed or 0, 2**32)[::-1] for own in options]
    streams = [request.stream for request in requests]
    return sampled, RowSampling(
        temperature=column("temperature"),
        top_k=jnp.asarray([min(own.top_k or 0, vocab_size) for own in options], jnp.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        repetition_penalty=column("repetition_penalty"),
        seed=jnp.asarray(seeds, jnp.uint32),
        stream=jnp.asarray(streams, jnp.int32),
        seen=jnp.asarray(seen),
    )


def greedy(given: Any, nth: Int32[Array, ""], logits: Float32[Array, "B V"]) -> Chosen:
    """Takes the likeliest token of each row; it carries nothing."""
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    return tokens, _logprobs(logits, tokens), given


def forced(
    given: Int32[Array, "n B"], nth: Int32[Array, ""], logits: Float32[Array, "B V"]
) -> Chosen:
    """Takes the tokens of a table, whatever the logits; it carries the table."""
    tokens = given[nth]
    return tokens, _logprobs(logits, tokens), given


def forced_then_greedy(
    given: Int32[Array, "n B"], nth: Int32[Array, ""], logits: Float32[Array, "B V"]
) -> Chosen:
    """Takes the tokens of a table, and where that has -1 or ends the likeliest; it carries it."""
    wanted = given.at[nth].get(mode="fill", fill_value=-1)
    tokens = jnp.where(wanted < 0, jnp.argmax(logits, -1).astype(jnp.int32), wanted)
    return tokens, _logprobs(logits, tokens), given


def sampled(given: RowSampling, nth: Int32[Array, ""], logits: Float32[Array, "B V"]) -> Chosen:
    """Samples the next token of each row with the row's own options.

    A row draws from its own seed and stream, folded with the token's number, so that its choice
    does not depend on the rest of the batch.
    """
    penalty = given.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    wanted = jnp.where(given.seen, penalised, logits)

    def draw(seed: Array, stream: Array, row: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed[0]), seed[1])
        return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, nth), stream), row)

    drawn = jax.vmap(draw)(given.seed, given.stream, truncated(given, wanted))
    tokens = jnp.where(given.temperature == 0, jnp.argmax(wanted, -1), drawn).astype(jnp.int32)
    seen = given.seen.at[jnp.arange(tokens.shape[0]), tokens].set(True)
    return tokens, _logprobs(logits, tokens), given._replace(seen=seen)


def truncated(given: RowSampling, logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Scales the logits by the temperature and sets those that the options rule out to -inf.

    top_k and top_p keep exactly the set they name; equal logits at the edge go to the lowest token
    id. A cut that no row asks for is skipped.
    """
    vocab = logits.shape[-1]
    temperature = jnp.where(given.temperature == 0, 1.0, given.temperature)[:, None]
    # no overflow, however cold
    logits = (logits - logits.max(-1, keepdims=True)) / temperature

    def cut(wanted: Array, kept: Callable[[Array], Array], x: Array) -> Array:
        return jax.lax.cond(
            jnp.any(wanted),
            lambda x: jnp.where(kept(x) | ~wanted[:, None], x, -jnp.inf),
            lambda x: x,
            x,
        )

    some_k = (given.top_k > 0) & (given.top_k < vocab)
    logits = cut(some_k, lambda x: top_k_mask(x, given.top_k), logits)
    some_p = given.top_p < 1
    logits = cut(some_p, lambda x: top_p_mask(jax.nn.softmax(x), given.top_p), logits)

    def likely(x: Array) -> Array:
        probs = jax.nn.softmax(x)
        return probs >= given.min_p[:, None] * probs.max(-1, keepdims=True)

    return cut(given.min_p > 0, likely, logits)


def _logprobs(logits: Float32[Array, "B V"], tokens: Rows) -> Float32[Array, "B"]:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], -1)
    return chosen[:, 0]
