"""Defines `generate`, which validates a request and runs it with jsparse.runtime.session."""

import time
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jsparse import prompts
from jsparse.cache import CacheSpec
from jsparse.host_reader import Generation, OnProgress, Reader, Row, Streamer
from jsparse.models.checkpoint import Params
from jsparse.policies.expressions import as_policy
from jsparse.policy import Policy
from jsparse.runtime import capacity, session
from jsparse.runtime.compilation import keep_compilations
from jsparse.runtime.sampling import Sampling
from jsparse.text_stream import TextStream

PAGE_SIZES = (8, 16, 32, 64)
Message = Mapping[str, Any]
OnePrompt = str | Sequence[int] | Sequence[Message]
# str is a sequence of str, so that many texts are a list or a tuple
ManyPrompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate`, which documents them."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int
    stop: str | Sequence[str]
    eos_token_id: int | Sequence[int] | None
    logprobs: bool
    streamer: Streamer | Sequence[Streamer] | None
    policy: Policy | str
    max_length: int | None
    page_size: int
    on_progress: OnProgress | None


@overload
def generate(
    params: Params, prompt: OnePrompt, **options: Unpack[GenerateOptions]
) -> Generation: ...
@overload
def generate(
    params: Params, prompt: ManyPrompts, **options: Unpack[GenerateOptions]
) -> list[Generation]: ...
@overload
def generate(
    params: Params, prompt: np.ndarray | Array, **options: Unpack[GenerateOptions]
) -> Any: ...
def generate(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    eos_token_id: int | Sequence[int] | None = None,
    logprobs: bool = False,
    streamer: Streamer | Sequence[Streamer] | None = None,
    policy: Policy | str = "dense",
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnProgress | None = None,
) -> Any:
    """Continues a prompt, or a batch of prompts.

    The decode step is compiled once for each batch size, capacity and policy, prefill also for each
    size of its last chunk, a power of two. Other prompts and options need no new compilation.

    Args:
        params: the model that `jsparse.load` returned.
        prompt: text, chat messages (dicts with role and content), token ids, or a list of any of
            these.
        max_new_tokens: the maximum number of tokens to generate.
        temperature: the sampling temperature; 0 is greedy. For this and the next four options, None
            means the value in the model's generation_config, else off.
        top_k: the number of likeliest tokens to keep; 0 is off.
        top_p: the total probability of the likeliest tokens to keep; 1 is off.
        min_p: the least probability to keep, relative to the likeliest token's; 0 is off.
        repetition_penalty: the factor that divides positive and multiplies negative logits of
            tokens seen so far; 1 is off.
        seed: the random seed; the same seed gives the same text.
        stop: strings that end the text and are cut off.
        eos_token_id: ids that end the text; [] never stops; None means the model's own.
        logprobs: whether to return each token's log-probability.
        streamer: a callable that gets each piece of text as it is made, or a list with one per
            prompt.
        policy: the policy, or its expression, that chooses what decoding attends to. The prompt is
            always read densely.
        max_length: the cache's capacity in tokens; None fits the longest prompt and max_new_tokens,
            rounded up so that few sizes are compiled.
        page_size: the number of tokens per page: 8, 16, 32 or 64.
        on_progress: a callable that gets ("prefill" | "decode", done, total), in tokens.

    Returns:
        A Generation, or a list of them for a list of prompts.

    Raises:
        ValueError: an argument is out of its range, or prompt and new tokens do not fit.
    """
    rows, alone = prompts.encode(params, prompt)
    options = _sampling(params, temperature, top_k, top_p, min_p, repetition_penalty)
    chosen = as_policy(policy)
    stop = stop_strings(params, stop)
    ends = end_tokens(params, eos_token_id)
    spec = cache_spec(params, rows, max_new_tokens, max_length, page_size)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: must be an integer from 0 to 2^63 - 1")
    streamers = _streamers(streamer, len(rows), alone)
    capacity.require_fit(spec, chosen)
    keep_compilations()
    report = on_progress or (lambda *_: None)
    reader = Reader(
        [Row(TextStream(params.tokenizer, stop), ends, emit) for emit in streamers],
        max_new_tokens,
        report,
    )
    began = time.perf_counter()
    with capacity.exhaustion(spec):
        primed = session.prime(params, chosen, rows, spec, report)
        session.decode(params, chosen, options, rows, primed, seed, reader)
    outs = [reader.generation(i, len(ids), began, logprobs) for i, ids in enumerate(rows)]
    return outs[0] if alone else outs


def _sampling(params: Params, temperature, top_k, top_p, min_p, repetition_penalty) -> Sampling:
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    chosen = {name: _number(name, value) for name, value in given.items() if value is not None}
    defaults = {
        name: value
        for name, value in params.generation_defaults.items()
        if name in Sampling._fields
    }
    return Sampling(**(defaults | chosen)).validate()


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: must be a number that fits in a float") from None
    return int(number) if isinstance(value, Integral) else number


def stop_strings(params: Params, stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the strings that end a text.

    Raises:
        ValueError: one is not a string or is empty, or there is no tokenizer to find them.
    """
    if not isinstance(stop, Sequence):
        raise ValueError(f"stop={stop!r}: must be a string or a list of strings")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={list(stop)!r}: must be strings of at least one character")
    if stop:
        prompts.tokenizer_of(params, "stop")
    return stop


def end_tokens(params: Params, eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """Returns the tokens that end a text, by default the model's own.

    Raises:
        ValueError: a token is outside the vocabulary.
    """
    if eos_token_id is None:
        eos_token_id = params.generation_defaults.get("eos_token_id")
    if eos_token_id is None:
        return frozenset(params.tokenizer.eos_token_ids if params.tokenizer else ())
    ids = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
    for token in ids:
        if (
            not isinstance(token, int)
            or isinstance(token, bool)
            or not 0 <= token < params.config.vocab_size
        ):
            raise ValueError(
                f"eos_token_id={token!r}: must be token ids from 0 to "
                f"{params.config.vocab_size - 1}"
            )
    return frozenset(ids)


def cache_spec(
    params: Params,
    rows: list[list[int]],
    max_new_tokens: int,
    max_length: int | None,
    page_size: int,
) -> CacheSpec:
    """Returns the cache's sizes.

    Raises:
        ValueError: an argument is out of its range, or prompt and new tokens do not fit the model
            or the capacity asked for.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
        if name == "max_length" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise ValueError(f"page_size={page_size!r}: must be one of {PAGE_SIZES}")
    config, longest = params.config, max(map(len, rows))
    needed = longest + max_new_tokens
    limits = {"the model's maximum": config.max_position_embeddings, "max_length": max_length}
    for name, limit in limits.items():
        if limit is not None and needed > limit:
            raise ValueError(
                f"prompt of {longest} tokens + max_new_tokens={max_new_tokens} is {needed}: "
                f"must be at most {limit}, {name}"
            )
    slots = capacity.bucket(needed, page_size) if max_length is None else max_length
    return CacheSpec(
        num_layers=config.num_layers,
        batch=len(rows),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=-(-slots // page_size),
        dtype=jnp.dtype(params.dtype),
    )


def _streamers(
    streamer: Streamer | Sequence[Streamer] | None, rows: int, alone: bool
) -> list[Streamer]:
    if streamer is None:
        return [lambda piece: None] * rows
    given = list(streamer) if isinstance(streamer, Sequence) else [streamer]
    if len(given) != rows or not all(callable(s) for s in given):
        raise ValueError(
            f"streamer={streamer!r}: must be one callable for each of the {rows} prompt(s)"
        )
    return given
