"""The options of `generate`, and their conversion into sampling parameters."""

from collections.abc import Sequence
from typing import Any, TypedDict

from jsparse.hyper_parameters import flag, whole_number
from jsparse.models.checkpoint import Params
from jsparse.policy import AnyPolicy, PrefillMethod
from jsparse.runtime.host_reader import OnChunk, Streamer, TokenStreamer
from jsparse.runtime.request import require_alone
from jsparse.runtime.sampling_params import SamplingParams

# the maximum number of drafts per verification round
MAX_SPECULATIVE_TOKENS = 32


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
    prefill: PrefillMethod | str
    exact: bool
    num_speculative_tokens: int | None
    sampling: SamplingParams | Sequence[SamplingParams] | None
    max_length: int | None
    page_size: int
    on_progress: OnChunk | None


def chosen_sampling(
    params: Params,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    seed: int,
    **options: Any,
) -> SamplingParams | Sequence[SamplingParams]:
    """Returns `sampling`, or else the SamplingParams of the options.

    Raises:
        ValueError: a value is out of range, an option is supported by engines only, or both are
            given.
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


def num_drafts(exact: bool, num_speculative_tokens: int | None) -> int | None:
    """Returns the number of tokens that a policy drafts per verification round.

    0: no drafting. None: chosen later.

    Raises:
        ValueError: one of the two is out of range, or the number is given without `exact`.
    """
    flag("exact", exact)
    if num_speculative_tokens is None:
        return None if exact else 0
    whole_number("num_speculative_tokens", num_speculative_tokens, 1)
    if num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens}: must be at most "
            f"{MAX_SPECULATIVE_TOKENS}"
        )
    if not exact:
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens}: must not be given without exact=True"
        )
    return num_speculative_tokens


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
    """Returns the SamplingParams for options with the names of `generate`.

    Raises:
        ValueError: a value is out of range.
    """
    whole_number("max_new_tokens", max_new_tokens, 1)
    minimum = 0 if min_new_tokens is None else min_new_tokens
    whole_number("min_new_tokens", minimum, 0)
    if minimum > max_new_tokens:
        raise ValueError(
            f"min_new_tokens={minimum}: must be at most max_new_tokens, which is {max_new_tokens}"
        )
    if stop is not None and stop_strings is not None:
        raise ValueError(f"stop_strings={stop_strings!r}: must not be given with stop={stop!r}")
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
    """Returns the temperature that corresponds to Hugging Face's `do_sample`."""
    if do_sample is None:
        return temperature
    if not isinstance(do_sample, bool):
        raise ValueError(f"do_sample={do_sample!r}: must be true or false")
    if temperature is not None and do_sample != (temperature > 0):
        rule = "above 0" if do_sample else "0, which is greedy, or not given"
        raise ValueError(f"do_sample={do_sample}: temperature={temperature!r} must be {rule}")
    if not do_sample:
        return 0.0
    default = params.generation_defaults.get("temperature")
    return temperature or default or 1.0


def _end_tokens(params: Params, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos_token_id is None:
        return ()
    ids = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
    vocab = params.config.vocab_size
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise ValueError(f"eos_token_id={token!r}: must be token ids from 0 to {vocab - 1}")
    return tuple(ids)


def streamers_of(streamer: Streamer | Sequence[Streamer] | None, rows: int) -> list[Streamer]:
    """Returns a streamer per row; for None, streamers that do nothing.

    Raises:
        ValueError: it is not a streamer, or the list does not have one per row.
    """
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
