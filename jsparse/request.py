"""Defines what one prompt asks for: SamplingParams, and the Request that they are checked into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jsparse import prompts
from jsparse.models.checkpoint import Params
from jsparse.policy import Policy, require_knob

FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
# the value at which each option does nothing, for models that name no default of their own
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingParams:
    """Says how to continue one prompt, with the names that vLLM uses.

    Options apply in this order: repetition_penalty, temperature, top_k, top_p, min_p. None means
    the value in the model's generation_config, else off. At temperature 0 the choice is greedy and
    only the repetition penalty matters.

    Attributes:
        temperature: the sampling temperature; 0 is greedy.
        top_k: the number of likeliest tokens to keep; 0 is off.
        top_p: the total probability of the likeliest tokens to keep; 1 is off.
        min_p: the least probability to keep, relative to the likeliest token's; 0 is off.
        repetition_penalty: the factor that divides positive and multiplies negative logits of
            tokens seen so far; 1 is off.
        seed: the random seed; the same seed gives the same text, whatever runs beside it. None
            draws from the seed of the call, differently for each prompt.
        stop: strings that end the text and are cut off.
        stop_token_ids: ids that end the text, beside the model's own end tokens.
        ignore_eos: whether the model's own end tokens do not end the text.
        max_tokens: the maximum number of tokens to generate.
        logprobs: 0 to return the log-probability of each generated token, None not to.
        policy: hyper-parameters of the policy for this prompt: any that the policy lists in
            `per_row`, such as {"p": 0.9}, and {"dense": True} to attend to everything.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int = 128
    logprobs: int | None = None
    policy: Mapping[str, float | bool] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Checks what does not depend on the model."""
        for name in OFF:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _option(name, value))
        seed = self.seed
        if seed is not None and (not _is_int(seed) or not 0 <= seed < 2**63):
            raise ValueError(f"seed={seed!r}: must be an integer from 0 to 2^63 - 1")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r}: must be an integer of at least 1")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: must be true or false")
        if self.logprobs not in (None, 0) or isinstance(self.logprobs, bool):
            raise ValueError(f"logprobs={self.logprobs!r}: must be None or 0")
        if not isinstance(self.policy, Mapping):
            raise ValueError(f"policy={self.policy!r}: must map names to values")
        object.__setattr__(self, "policy", dict(self.policy))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Returns whether the likeliest token is taken as it is; only for checked requests."""
        return self.temperature == 0 and self.repetition_penalty == 1


@dataclass(frozen=True)
class Request:
    """Holds one prompt and what it asks for, checked.

    Attributes:
        ids: the prompt.
        sampling: the options, with the model's defaults in place of None.
        ends: the tokens that end the text.
        stream: the stream of random numbers to draw from, of those that the seed has.
    """

    ids: list[int]
    sampling: SamplingParams
    ends: frozenset[int]
    stream: int

    @property
    def most_tokens(self) -> int:
        """Returns the most tokens that prompt and answer can have together."""
        return len(self.ids) + self.sampling.max_tokens


def requests(
    params: Params,
    rows: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    policy: Policy,
    *,
    seed: int = 0,
) -> list[Request]:
    """Checks the requests of a batch.

    Args:
        params: the model.
        rows: the prompts, as `prompts.encode` returns them.
        sampling: the options of all prompts, or one entry per prompt.
        policy: the policy that decodes.
        seed: the seed of prompts whose options name none.

    Raises:
        ValueError: an option is not among those of the model or the policy, or there is not one
            entry per prompt.
    """
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(rows)
    given = sampling if isinstance(sampling, Sequence) else [sampling]
    for own in given:
        if not isinstance(own, SamplingParams):
            raise ValueError(f"sampling={own!r}: must be SamplingParams, or a list of them")
    if len(sampling) != len(rows):
        raise ValueError(
            f"sampling has {len(sampling)} entries: must have one for each of the {len(rows)} "
            "prompt(s)"
        )
    return [
        _request(params, ids, own, policy, seed, row)
        for row, (ids, own) in enumerate(zip(rows, sampling, strict=True))
    ]


def _request(
    params: Params, ids: list[int], sampling: SamplingParams, policy: Policy, seed: int, row: int
) -> Request:
    for name, value in sampling.policy.items():
        if name == "dense" and not isinstance(value, bool):
            raise ValueError(f"dense={value!r}: must be true or false")
        if name == "dense" and value and policy.evicts:
            raise ValueError(
                f"dense={value!r}: must not be set where the policy drops tokens, as {policy} does"
            )
        if name != "dense":
            require_knob(policy, name, value)
    if sampling.stop:
        prompts.tokenizer_of(params, "stop")
    defaults = OFF | {k: v for k, v in params.generation_defaults.items() if k in OFF}
    chosen = {name: getattr(sampling, name) for name in OFF}
    own_seed = sampling.seed is not None
    resolved = replace(
        sampling,
        **{name: defaults[name] if value is None else value for name, value in chosen.items()},
        seed=sampling.seed if own_seed else seed,
    )
    return Request(ids, resolved, _ends(params, sampling), 0 if own_seed else row)


def _ends(params: Params, sampling: SamplingParams) -> frozenset[int]:
    for token in sampling.stop_token_ids:
        if token >= params.config.vocab_size:
            raise ValueError(
                f"stop_token_ids={token}: must be token ids from 0 to "
                f"{params.config.vocab_size - 1}"
            )
    own = () if sampling.ignore_eos else end_tokens(params)
    return frozenset((*sampling.stop_token_ids, *own))


def knobs(asked: Sequence[Request]) -> dict[str, Array] | None:
    """Returns the hyper-parameters that some request sets, each with a number per row.

    Rows that do not set one have NaN, which leaves them the policy's own. `dense` is a flag.
    """
    set_by = [request.sampling.policy for request in asked]
    # a flag that nobody raises needs no program of its own
    names = sorted({name for own in set_by for name, value in own.items() if value is not False})
    rows = {name: [own.get(name, float("nan")) for own in set_by] for name in names}
    return {
        name: jnp.asarray([value is True for value in row])
        if name == "dense"
        else jnp.asarray(row, jnp.float32)
        for name, row in rows.items()
    } or None


def end_tokens(params: Params) -> frozenset[int]:
    """Returns the model's own end tokens."""
    named = params.generation_defaults.get("eos_token_id")
    if named is None:
        return frozenset(params.tokenizer.eos_token_ids if params.tokenizer else ())
    return frozenset(named if isinstance(named, Sequence) else [named])


def _option(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: must be a number that fits in a float") from None
    number = int(value) if isinstance(value, Integral) else number
    ok, rule = {
        "temperature": (number >= 0, "a number of at least 0 (0 is greedy)"),
        "top_k": (number >= 0 and number % 1 == 0, "an integer of at least 0 (0 is off)"),
        "top_p": (0 < number <= 1, "a number above 0 and at most 1 (1 is off)"),
        "min_p": (0 <= number <= 1, "a number from 0 to 1 (0 is off)"),
        "repetition_penalty": (number > 0, "a number above 0 (1 is off)"),
    }[name]
    if not ok or (name != "top_k" and number > FLOAT32_MAX):
        raise ValueError(f"{name}={value!r}: must be {rule}")
    return number


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, Sequence):
        raise ValueError(f"stop={stop!r}: must be a string or a list of strings")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={list(stop)!r}: must be strings of at least one character")
    return stop


def _ids(tokens: Any) -> tuple[int, ...]:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise ValueError(f"stop_token_ids={tokens!r}: must be a list of token ids")
    for token in tokens:
        if not _is_int(token) or token < 0:
            raise ValueError(f"stop_token_ids={token!r}: must be token ids, integers from 0 on")
    return tuple(map(int, tokens))


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
