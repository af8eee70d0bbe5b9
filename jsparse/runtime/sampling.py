"""Chooses the next token of each row: greedily, by sampling, or from given tokens.

A `ChooseFn` is a static function of a carry, the token's number and the logits. Two serve
generation: `greedy`, for batches in which all rows are greedy, and `sampled`, in which every option
is a number per row, so that no value of an option compiles anything again. Options that Hugging
Face's logits processors have mean the same as there, the others the same as in vLLM; SamplingParams
has their order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt16, UInt32

from jsparse.runtime.request import Request
from jsparse.runtime.sampling_params import MAX_BIASES, MAX_END_IDS
from jsparse.runtime.structured_outputs import EVERY_TOKEN, bits
from jsparse.selection.threshold import top_k_mask
from jsparse.shapes import Rows

if TYPE_CHECKING:
    from jsparse.runtime.bad_words import BadWords
    from jsparse.runtime.constraint import Constraint

NextTokens = tuple[Rows, Float32[Array, "B"], Any]
# one number for all rows, or one per row if rows started at different times
Nth = Int32[Array, ""] | Int32[Array, "B"]
# the rows that take part; None: all
Active = Bool[Array, "B"] | None
# the number of most likely tokens that `top_logprobs` returns, and of neighbours in a group
TOP, GROUP = 20, 64
MAX_COUNTED = np.iinfo(np.uint16).max


class ChooseFn(Protocol):
    """Chooses token number `nth` of each row; returns it, its log-probability and the carry.

    The log-probability is under the model's own softmax, before any options. The tokens of inactive
    rows are invalid, and their part of the carry does not change. None: all rows are active.
    """

    def __call__(
        self,
        given: Any,
        nth: Nth,
        logits: Float32[Array, "B V"],
        active: Active,
        /,
    ) -> NextTokens: ...


class RowSampling(NamedTuple):
    """The options of SamplingParams per row, and the tokens generated so far.

    Lists of token ids are padded with the size of the vocabulary, which is no token's id.

    Attributes:
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            min_tokens: as in SamplingParams.
        bias_ids, bias_values: logit_bias.
        ends: the tokens that cannot be chosen before min_tokens; none if that is 0.
        limited: whether only some tokens may be chosen.
        allowed: a bit for each token that may be chosen, the lowest of the first word for id 0;
            words = ⌈V / 32⌉.
        seed: the lower and the upper half of the seed.
        stream: the number of the seed's random stream.
        seen: the tokens in the text so far, including the prompt.
        counts: how often each token was generated, up to 65,535 times.
    """

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    repetition_penalty: Float32[Array, "B"]
    presence_penalty: Float32[Array, "B"]
    frequency_penalty: Float32[Array, "B"]
    bias_ids: Int32[Array, "B 300"]
    bias_values: Float32[Array, "B 300"]
    min_tokens: Int32[Array, "B"]
    ends: Int32[Array, "B 16"]
    limited: Bool[Array, "B"]
    allowed: UInt32[Array, "B words"]
    seed: UInt32[Array, "B 2"]
    stream: Int32[Array, "B"]
    seen: Bool[Array, "B V"]
    counts: UInt16[Array, "B V"]


class TopLogprobs(NamedTuple):
    """The most likely tokens of each row, best first; ties go to the lower id.

    Attributes:
        ids: the tokens: TOP of them, or the whole vocabulary if it is smaller.
        logprobs: their log-probabilities under the model's own softmax, before any options.
    """

    ids: Int32[Array, "B top"]
    logprobs: Float32[Array, "B top"]


def chooser(requests: Sequence[Request], vocab_size: int) -> tuple[ChooseFn, Any]:
    """Returns the ChooseFn for a batch, and its initial carry."""
    if all(request.sampling.greedy for request in requests):
        return greedy, ()
    choose = constrained if any(request.constraint for request in requests) else sampled
    return choose, jax.tree.map(jnp.asarray, row_sampling(requests, vocab_size))


def row_sampling(requests: Sequence[Request], vocab_size: int) -> RowSampling:
    """Returns the initial carry of `sampled` for these requests, as numpy arrays."""
    options = [request.sampling for request in requests]
    rows = len(requests)
    seen = np.zeros((rows, vocab_size), np.bool_)
    bias_ids = np.full((rows, MAX_BIASES), vocab_size, np.int32)
    bias_values = np.zeros((rows, MAX_BIASES), np.float32)
    ends = np.full((rows, MAX_END_IDS), vocab_size, np.int32)
    states = [request.constraint for request in requests]
    for row, (request, own) in enumerate(zip(requests, options, strict=True)):
        seen[row, request.ids] = True
        biases = own.logit_bias or {}
        bias_ids[row, : len(biases)] = [*biases]
        bias_values[row, : len(biases)] = [*biases.values()]
        if own.min_tokens:
            ends[row, : len(request.ends)] = sorted(request.ends)

    def column(name: str, dtype: type = np.float32) -> Any:
        return np.array([getattr(own, name) for own in options], dtype)

    made: dict[str, Any] = {
        "temperature": column("temperature"),
        "top_k": np.array([min(own.top_k or 0, vocab_size) for own in options], np.int32),
        "top_p": column("top_p"),
        "min_p": column("min_p"),
        "repetition_penalty": column("repetition_penalty"),
        "presence_penalty": column("presence_penalty"),
        "frequency_penalty": column("frequency_penalty"),
        "bias_ids": bias_ids,
        "bias_values": bias_values,
        "min_tokens": column("min_tokens", np.int32),
        "ends": ends,
        "limited": np.array(
            [
                request.constraint is not None or own.allowed_token_ids is not None
                for request, own in zip(requests, options, strict=True)
            ]
        ),
        "allowed": allowed_tokens(requests, states, vocab_size),
        # a key takes 32 bits of a seed: the upper ones are folded in
        "seed": np.array([divmod(own.seed or 0, 2**32)[::-1] for own in options], np.uint32),
        "stream": np.array([request.stream for request in requests], np.int32),
        "seen": seen,
        "counts": np.zeros((rows, vocab_size), np.uint16),
    }
    return RowSampling(**made)


def allowed_tokens(
    requests: Sequence[Request], states: Sequence["Constraint | BadWords | None"], vocab_size: int
) -> UInt32[np.ndarray, "B words"]:
    """Returns the bits of the tokens that may come next, given the outputs' grammars."""
    words = np.full((len(requests), -(-vocab_size // 32)), EVERY_TOKEN, np.uint32)
    for own, request, state in zip(words, requests, states, strict=True):
        ids = request.sampling.allowed_token_ids
        if state is not None:
            own[:] = state.allowed()
        elif ids is not None:
            own[:] = bits(ids, vocab_size)
    return words


def greedy(
    given: Any, nth: Nth, logits: Float32[Array, "B V"], active: Active = None
) -> NextTokens:
    """Chooses the most likely token of each row; its carry does not change."""
    tokens = _likeliest(logits)
    return tokens, _logprobs(logits, tokens), given


def forced(
    given: Int32[Array, "n B"], nth: Nth, logits: Float32[Array, "B V"], active: Active = None
) -> NextTokens:
    """Chooses the tokens of a table, regardless of the logits; its carry is the table."""
    tokens = given[nth]
    return tokens, _logprobs(logits, tokens), given


def forced_then_greedy(
    given: Int32[Array, "n B"], nth: Nth, logits: Float32[Array, "B V"], active: Active = None
) -> NextTokens:
    """Chooses the tokens of a table; at -1 and past its end, the most likely token.

    Its carry is the table.
    """
    wanted = given.at[nth].get(mode="fill", fill_value=-1)
    tokens = jnp.where(wanted < 0, _likeliest(logits), wanted)
    return tokens, _logprobs(logits, tokens), given


def sampled(
    given: RowSampling, nth: Nth, logits: Float32[Array, "B V"], active: Active = None
) -> NextTokens:
    """Samples the next token of each row with the row's own options.

    A row draws from its own seed and stream, folded with the token's number, so that its choice
    does not depend on the rest of the batch.
    """
    rows = jnp.arange(logits.shape[0])
    nth = jnp.broadcast_to(nth, rows.shape)
    options = given if active is None else _of_active(given, active)
    hot = options.temperature != 0

    def noise(seed: Array, stream: Array, nth: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed[0]), seed[1])
        key = jax.random.fold_in(jax.random.fold_in(key, nth), stream)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    def with_options(logits: Array) -> Rows:
        wanted = adjusted(options, nth, logits)

        def drawn(likeliest: Array) -> Array:
            noises = jax.vmap(noise)(given.seed, given.stream, nth)
            return jnp.where(hot, perturbed_argmax(options, wanted, noises), likeliest)

        return _if_any(hot, drawn, _likeliest(wanted))

    # greedy rows alone copy no logits between branches
    some = jnp.any(hot | _any_of(_adjustments(options, nth)))
    tokens = jax.lax.cond(some, with_options, _likeliest, logits)
    count = given.counts[rows, tokens]
    # the tokens of inactive rows are invalid and not counted
    at = rows, tokens if active is None else jnp.where(active, tokens, logits.shape[1])
    return (
        tokens,
        _logprobs(logits, tokens),
        given._replace(
            seen=given.seen.at[at].set(True, mode="drop"),
            counts=given.counts.at[at].set(
                jnp.where(count < MAX_COUNTED, count + 1, count), mode="drop"
            ),
        ),
    )


def constrained(
    given: RowSampling, nth: Nth, logits: Float32[Array, "B V"], active: Active = None
) -> NextTokens:
    """Samples as `sampled` does; the host sets `allowed` before each step, from the last token."""
    return sampled(given, nth, logits, active)


def _of_active(given: RowSampling, active: Bool[Array, "B"]) -> RowSampling:
    """Turns off the options of inactive rows, which need no computation."""
    off = {
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "min_tokens": 0,
    }
    rows = {
        name: jnp.where(active, own := getattr(given, name), jnp.asarray(value, own.dtype))
        for name, value in off.items()
    }
    bias = jnp.where(active[:, None], given.bias_values, 0)
    return given._replace(**rows, bias_values=bias, limited=given.limited & active)


def adjusted(
    given: RowSampling, nth: Int32[Array, "B"], logits: Float32[Array, "B V"]
) -> Float32[Array, "B V"]:
    """Sets forbidden tokens to -inf, adds the biases and applies the penalties.

    Steps that no row needs are skipped individually, and all at once if no row needs any.
    """
    rows, vocab = jnp.arange(logits.shape[0])[:, None], logits.shape[-1]
    limited, has_bias, early, repeats, counted = wanted = _adjustments(given, nth)

    def of_allowed(x: Array) -> Array:
        shifts = jnp.arange(32, dtype=jnp.uint32)
        flags = (given.allowed[:, :, None] >> shifts) & 1
        flags = flags.reshape(len(x), -1)[:, :vocab] != 0
        return jnp.where(flags, x, -jnp.inf)

    def biased(x: Array) -> Array:
        return x.at[rows, given.bias_ids].add(given.bias_values, mode="drop")

    def without_ends(x: Array) -> Array:
        ends = jnp.where(early[:, None], given.ends, vocab)
        return x.at[rows, ends].set(-jnp.inf, mode="drop")

    def repetition(x: Array) -> Array:
        penalty = given.repetition_penalty[:, None]
        return jnp.where(given.seen, jnp.where(x > 0, x / penalty, x * penalty), x)

    def presence_and_frequency(x: Array) -> Array:
        counts = given.counts.astype(jnp.float32)
        frequency = given.frequency_penalty[:, None] * counts
        return x - (frequency + given.presence_penalty[:, None] * (counts > 0))

    def changed(x: Array) -> Array:
        x = _if_any(limited, of_allowed, x)
        x = _if_any(has_bias, biased, x)
        x = _if_any(early, without_ends, x)
        x = _if_any(repeats, repetition, x)
        return _if_any(counted, presence_and_frequency, x)

    return _if_any(_any_of(wanted), changed, logits)


class _Adjustments(NamedTuple):
    """Which rows need changes: may choose only some tokens, have biases, have end tokens to avoid,
    and have penalties of repetition and of counts.
    """

    limited: Bool[Array, "B"]
    bias: Bool[Array, "B"]
    early: Bool[Array, "B"]
    repeats: Bool[Array, "B"]
    counted: Bool[Array, "B"]


def _adjustments(given: RowSampling, nth: Int32[Array, "B"]) -> _Adjustments:
    early = nth < given.min_tokens
    counted = (given.presence_penalty != 0) | (given.frequency_penalty != 0)
    return _Adjustments(
        given.limited,
        jnp.any(given.bias_values != 0, axis=1),
        early,
        given.repetition_penalty != 1,
        counted,
    )


def _any_of(wanted: _Adjustments) -> Bool[Array, "B"]:
    return functools.reduce(jnp.logical_or, wanted)


def perturbed_argmax(
    given: RowSampling, logits: Float32[Array, "B V"], noise: Float32[Array, "B V"]
) -> Rows:
    """Returns the token with the largest sum of logit and noise among those that options allow.

    With Gumbel noise that is a sample from the softmax. Options scale the logits by the temperature
    and exclude tokens: top_k and top_p keep exactly the set they name; ties at the edge go to the
    lowest token id. If no row sets top_k, it is skipped.

    top_p keeps a prefix of the tokens in order of their logits. If the best token is outside the
    prefix, so is every token after it: the search repeats over the tokens before it until it finds
    one in the prefix.
    """
    vocab = logits.shape[-1]
    temperature = jnp.where(given.temperature == 0, 1.0, given.temperature)[:, None]
    # no overflow at any temperature: the most likely token has 0, so exp(logits) are weights up to
    # 1
    logits = (logits - logits.max(-1, keepdims=True)) / temperature
    some_k = (given.top_k > 0) & (given.top_k < vocab)

    def with_top_k(x: Array) -> Array:
        return jnp.where(top_k_mask(x, given.top_k) | ~some_k[:, None], x, -jnp.inf)

    logits = _if_any(some_k, with_top_k, logits)
    weights, ids = jnp.exp(logits), jnp.arange(vocab, dtype=jnp.int32)
    target = given.top_p * jnp.sum(weights, -1)
    perturbed = jnp.where(weights >= given.min_p[:, None], logits + noise, -jnp.inf)

    def before(tokens: Rows) -> Bool[Array, "B V"]:
        own = jnp.take_along_axis(logits, tokens[:, None], -1)
        return (logits > own) | ((logits == own) & (ids < tokens[:, None]))

    def is_kept(tokens: Rows) -> Bool[Array, "B"]:
        ahead = before(tokens)
        mass = jnp.sum(jnp.where(ahead, weights, 0.0), -1)
        # a row keeps at least one token: p times the sum can underflow to 0
        return (given.top_p >= 1) | (mass < target) | ~jnp.any(ahead, -1)

    def again(carry: tuple[Rows, Bool[Array, "B"]]) -> tuple[Rows, Bool[Array, "B"]]:
        tokens, found = carry
        other = jnp.argmax(jnp.where(before(tokens), perturbed, -jnp.inf), -1)
        tokens = jnp.where(found, tokens, other.astype(jnp.int32))
        return tokens, found | is_kept(tokens)

    tokens = jnp.argmax(perturbed, -1).astype(jnp.int32)
    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[1]), again, (tokens, is_kept(tokens)))[0]


def top_logprobs(logits: Float32[Array, "B V"]) -> TopLogprobs:
    """Returns the TOP most likely tokens of each row with their log-probabilities."""
    ids = _top_ids(logits, min(TOP, logits.shape[-1]))
    return TopLogprobs(ids, jnp.take_along_axis(jax.nn.log_softmax(logits), ids, -1))


def _top_ids(logits: Float32[Array, "B V"], count: int) -> Int32[Array, "B count"]:
    """Returns the `count` most likely tokens of each row, best first; ties go to the lower id.

    They are among the `count` groups of neighbours with the largest maxima: sorting these maxima
    and then these groups takes a quarter of the time of sorting a vocabulary of 128,256.
    """
    rows, vocab = logits.shape
    if vocab <= GROUP * count:
        return jax.lax.top_k(logits, count)[1]
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % GROUP)), constant_values=-jnp.inf)
    groups = padded.reshape(rows, -1, GROUP)
    # in the order of ids, so that ties stay in it
    chosen = jnp.sort(jax.lax.top_k(jnp.max(groups, axis=-1), count)[1], axis=-1)
    candidates = jnp.take_along_axis(groups, chosen[..., None], axis=1).reshape(rows, -1)
    at = jax.lax.top_k(candidates, count)[1]
    return GROUP * jnp.take_along_axis(chosen, at // GROUP, axis=-1) + at % GROUP


def _likeliest(logits: Float32[Array, "B V"]) -> Rows:
    return jnp.argmax(logits, -1).astype(jnp.int32)


def _if_any(wanted: Array, changed: Callable[[Array], Array], x: Array) -> Array:
    return jax.lax.cond(jnp.any(wanted), changed, lambda x: x, x)


def _logprobs(logits: Float32[Array, "B V"], tokens: Rows) -> Float32[Array, "B"]:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], -1)
    return chosen[:, 0]
