"""Defines `generate`, which checks requests and runs them with jsparse.runtime.session."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, TypedDict, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params, require_params
from jsparse.names import GENERATE, takes
from jsparse.policies.expressions import as_policy
from jsparse.policy import AnyPolicy
from jsparse.runtime import capacity
from jsparse.runtime.compilation import keep_compilations
from jsparse.runtime.host_reader import (
    AnswerRow,
    Generation,
    OnChunk,
    Reader,
    Streamer,
    TokenStreamer,
    text_stream,
)
from jsparse.runtime.request import Request, knobs, per_prompt, requests, require_alone
from jsparse.runtime.sampling import chooser, forced_then_greedy
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.runtime.session import Session
from jsparse.text import prompts

Message = Mapping[str, Any]
OnePrompt = str | Sequence[int] | Sequence[Message]
# str is a sequence of str, so that many texts are a list or a tuple
ManyPrompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate`, which documents them."""

    max_new_tokens: int
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_strings: str | Sequence[str] | None
    eos_token_id: int | Sequence[int] | None
    logprobs: bool
    streamer: Streamer | Sequence[Streamer] | None
    policy: AnyPolicy | str
    sampling: SamplingParams | Sequence[SamplingParams] | None
    max_length: int | None
    page_size: int
    on_progress: OnChunk | None


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
@takes(GENERATE)
def generate(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    min_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    logprobs: bool = False,
    streamer: Streamer | Sequence[Streamer] | None = None,
    policy: AnyPolicy | str = "dense",
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnChunk | None = None,
) -> Any:
    """Continues a prompt, or a batch of prompts.

    The decode step is compiled once for each batch size, capacity and policy, prefill also for each
    size of its last chunk, a power of two. Greedy decoding and sampling are two programs; other
    prompts and other values of options need no new compilation.

    Args:
        params: the model that `jsparse.load` returned.
        prompt: text, chat messages (dicts with role and content), token ids, or a list of any of
            these.
        max_new_tokens: the maximum number of tokens to generate.
        do_sample: False is greedy, True samples, at temperature 1 where neither `temperature` nor
            the model names one; None leaves it to the temperature.
        temperature: the sampling temperature; 0 is greedy. For this and the next four options, None
            means the value in the model's generation_config, else off.
        top_k: the number of likeliest tokens to keep; 0 is off.
        top_p: the total probability of the likeliest tokens to keep; 1 is off.
        min_p: the least probability to keep, relative to the likeliest token's; 0 is off.
        repetition_penalty: the factor that divides positive and multiplies negative logits of
            tokens seen so far; 1 is off.
        seed: the random seed; the same seed gives the same text.
        min_new_tokens: the number of tokens before which nothing ends the text.
        stop: strings that end the text and are cut off; `stop_strings` is another name for it.
        stop_strings: the same.
        eos_token_id: ids that end the text; [] never stops; None means the model's own.
        logprobs: whether to return each token's log-probability.
        streamer: a callable that gets each piece of text as it is made, an object that takes ids as
            Hugging Face's streamers do (`put` and `end`), or a list with one per prompt.
        policy: the policy, or its expression, that chooses what decoding attends to; "auto" takes
            what was measured to be fastest for these sizes. The prompt is always read densely.
        sampling: how to continue each prompt, one SamplingParams for all or one per prompt; then
            none of the options from max_new_tokens to logprobs may be given but the seed, which is
            that of prompts whose SamplingParams names none.
        max_length: the cache's capacity in tokens; None fits the longest prompt and max_new_tokens,
            rounded up so that few sizes are compiled.
        page_size: the number of tokens per page: 8, 16, 32 or 64.
        on_progress: a callable that gets ("prefill" | "decode", done, total), in tokens.

    Returns:
        A Generation, or a list of them for a list of prompts.

    Raises:
        ValueError: an argument is out of its range or is refused, or prompt and new tokens do not
            fit.
        TypeError: there is no option of that name.
    """
    require_params(params)
    rows, alone = prompts.encode(params, prompt)
    chosen = as_policy(policy)
    given = chosen_sampling(
        params,
        sampling,
        seed,
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens,
        stop=stop,
        stop_strings=stop_strings,
        eos_token_id=eos_token_id,
        logprobs=logprobs,
    )
    options = per_prompt(given, len(rows))
    spec = capacity.cache_spec(
        params, rows, [own.max_tokens for own in options], max_length, page_size
    )
    session = Session(params, chosen, spec)
    asked = requests(params, rows, options, session.policy, seed=seed)
    streamers = _streamers(streamer, len(rows))
    outs = run(session, asked, streamers, on_progress or (lambda *_: None))
    return outs[0] if alone else outs


def run(
    session: Session,
    asked: Sequence[Request],
    streamers: Sequence[Streamer],
    report: OnChunk,
    read: Sequence[Sequence[int]] | None = None,
) -> list[Generation]:
    """Reads the prompts of a session's next turn and decodes the answers.

    `read` are the tokens to read of each prompt, where a further turn has read some before.

    Raises:
        ValueError: the device's memory does not suffice.
    """
    keep_compilations()
    began = session.clock()
    for request, streamer in zip(asked, streamers, strict=True):
        if isinstance(streamer, TokenStreamer):
            streamer.put(np.array([request.ids]))
    with capacity.exhaustion(session.spec):
        session.expect(
            *chooser(asked, session.params.config.vocab_size),
            limits=[request.sampling.max_tokens for request in asked],
            knobs=knobs(asked),
            report=report,
        )
        session.read([request.ids for request in asked] if read is None else read, report)
        return answers(session, asked, streamers, report, began)


def answers(
    session: Session,
    asked: Sequence[Request],
    streamers: Sequence[Streamer],
    report: OnChunk,
    began: float,
    questions: Sequence[Sequence[int]] | None = None,
) -> list[Generation]:
    """Decodes the answers to prompts that the session has read, since the time `began`.

    `questions` are tokens that follow each prompt and that decode steps take in, one by one, before
    they answer greedily: a policy that compresses the prompt does not know them then.
    """
    tokenizer = session.params.tokenizer
    turns = [()] * len(asked) if questions is None else questions
    rows = [
        AnswerRow(request, text_stream(tokenizer, request.sampling), emit, len(turn))
        for request, emit, turn in zip(asked, streamers, turns, strict=True)
    ]
    reader = Reader(rows, report, session.clock)
    if questions is None:
        choose, given = chooser(asked, session.params.config.vocab_size)
    else:
        choose, given = forced_then_greedy, _table(questions)
    limits = [row.given + row.request.sampling.max_tokens for row in rows]
    steps = session.steps(choose, given, limits=limits, knobs=knobs(asked))
    # so that the session is at rest even while someone looks at an exception
    with closing(steps):
        reader.read_all(steps)
    return reader.generations(began, session.policy.name)


def _table(questions: Sequence[Sequence[int]]) -> Int32[Array, "n B"]:
    """Returns the questions by step, with -1 behind them; few sizes, since each compiles."""
    steps = capacity.bucket(max(1, *map(len, questions)), 1)
    table = np.full((steps, len(questions)), -1, np.int32)
    for row, question in enumerate(questions):
        table[: len(question), row] = question
    return jnp.asarray(table)


def chosen_sampling(
    params: Params,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    seed: int,
    **options: Any,
) -> SamplingParams | Sequence[SamplingParams]:
    """Returns `sampling`, or else what `sampling_params` makes of the options.

    Raises:
        ValueError: a value is outside its range, only an engine can give it, or both are given.
    """
    made = sampling_params(params, **options)
    if sampling is not None and made != SamplingParams():
        raise ValueError(
            "sampling: must not be given with other options of sampling, such as max_new_tokens"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: must be an integer from 0 to 2^63 - 1")
    if sampling is None:
        return made
    require_alone(sampling)
    return sampling


def sampling_params(
    params: Params,
    *,
    max_new_tokens: int,
    do_sample: bool | None = None,
    temperature: float | None = None,
    min_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    logprobs: bool = False,
    **options: float | None,
) -> SamplingParams:
    """Returns the SamplingParams for options that are named as `generate` names them.

    Raises:
        ValueError: a value is outside its range.
    """
    whole_number("max_new_tokens", max_new_tokens, 1)
    minimum = 0 if min_new_tokens is None else min_new_tokens
    whole_number("min_new_tokens", minimum, 0)
    if minimum > max_new_tokens:
        raise ValueError(
            f"min_new_tokens={minimum}: must be at most max_new_tokens, which is {max_new_tokens}"
        )
    if stop is not None and stop_strings is not None:
        raise ValueError(f"stop_strings={stop_strings!r}: must not be given beside stop={stop!r}")
    return SamplingParams(
        max_tokens=max_new_tokens,
        min_tokens=minimum,
        temperature=_temperature(params, do_sample, temperature),
        stop=stop if stop_strings is None else stop_strings,
        stop_token_ids=_end_tokens(params, eos_token_id),
        ignore_eos=eos_token_id is not None,
        logprobs=0 if logprobs else None,
        **options,  # pyright: ignore[reportArgumentType]
    )


def _temperature(params: Params, do_sample: bool | None, temperature: float | None) -> float | None:
    """Returns the temperature that Hugging Face's `do_sample` leads to."""
    if do_sample is None:
        return temperature
    if not isinstance(do_sample, bool):
        raise ValueError(f"do_sample={do_sample!r}: must be true or false")
    if temperature is not None and do_sample != (temperature > 0):
        rule = "above 0" if do_sample else "0, which is greedy, or not given"
        raise ValueError(f"do_sample={do_sample}: temperature={temperature!r} must be {rule}")
    if not do_sample:
        return 0.0
    stated = params.generation_defaults.get("temperature")
    return temperature or stated or 1.0


def _end_tokens(params: Params, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos_token_id is None:
        return ()
    ids = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
    vocab = params.config.vocab_size
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise ValueError(f"eos_token_id={token!r}: must be token ids from 0 to {vocab - 1}")
    return tuple(ids)


def _streamers(streamer: Streamer | Sequence[Streamer] | None, rows: int) -> list[Streamer]:
    if streamer is None:
        return [lambda piece: None] * rows
    given = list(streamer) if isinstance(streamer, Sequence) else [streamer]
    for own in given:
        if not callable(own) and not isinstance(own, TokenStreamer):
            raise ValueError(f"streamer={own!r}: must be callable, or have the methods put and end")
    if len(given) != rows:
        raise ValueError(
            f"streamer={streamer!r}: must be a list of {rows}, one for each of the {rows} prompts"
        )
    return given
