"""Defines what one prompt asks for: SamplingParams, and the Request that they are checked into."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from jsparse.names import SAMPLING, takes
from jsparse.text import prompts

if TYPE_CHECKING:
    from jaxtyping import Array

    from jsparse.models.checkpoint import Params
    from jsparse.policy import Policy

FLOAT32_MAX = float(np.finfo(np.float32).max)
# sizes of the arrays that a row of jsparse.runtime.sampling.RowSampling takes
MAX_BIASES, MAX_END_IDS = 300, 16
# the value at which each option does nothing, for models that name no default of their own
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingParams:
    """Says how to continue one prompt, with the names that vLLM uses.

    Options change the logits in this order: logit_bias, min_tokens, repetition_penalty,
    presence_penalty and frequency_penalty, temperature, top_k, top_p, min_p. At temperature 0 the
    likeliest token after the penalties is taken. None for an option from temperature to
    repetition_penalty means the value in the model's generation_config, else off.

    Attributes:
        temperature: the sampling temperature; 0 is greedy.
        top_k: the number of likeliest tokens to keep; 0 and -1 are off.
        top_p: the total probability of the likeliest tokens to keep; 1 is off.
        min_p: the least probability to keep, relative to the likeliest token's; 0 is off.
        repetition_penalty: the factor that divides positive and multiplies negative logits of
            tokens in the prompt or generated so far; 1 is off.
        presence_penalty: the number, from -2 to 2, that is subtracted from the logit of each token
            generated so far; tokens of the prompt do not count.
        frequency_penalty: the number, from -2 to 2, that is subtracted from a token's logit for
            each time it was generated.
        logit_bias: numbers from -100 to 100 that are added to logits, by token id; at most 300.
            Ids may be strings of digits, as in JSON.
        n: the number of answers, from 1 to 16; `generate` gives one.
        seed: the random seed; the same seed gives the same text, whatever runs beside it. None
            draws from the seed of the call, differently for each prompt.
        stop: strings that end the text and are cut off.
        include_stop_str_in_output: whether the stop string stays in the text.
        skip_special_tokens: whether special tokens other than the one that ends the text are left
            out of it.
        stop_token_ids: ids that end the text, beside the model's own end tokens.
        ignore_eos: whether the model's own end tokens do not end the text.
        max_tokens: the maximum number of tokens to generate.
        min_tokens: the number of tokens before which nothing ends the text: no end token can be
            chosen, and a stop string counts only if a later token completes it.
        logprobs: the number of likeliest tokens, up to 20, to return log-probabilities of at each
            place, beside that of the generated token; 0 is the generated token's alone, None
            returns none. `generate` takes None and 0.
        policy: hyper-parameters of the policy for this prompt: any that the policy lists in
            `per_row`, such as {"p": 0.9}, and {"dense": True} to attend to everything.
        cache_salt: a secret of those who may share what has been read of their prompts: an engine's
            prefix cache serves nobody who names another one. How many tokens were cached then tells
            them nothing of the prompts of others.

    None for logit_bias, stop and stop_token_ids is none of them. What vLLM has beyond these options
    is refused by name (jsparse.names).

    Raises:
        ValueError: a value is outside its range, or an option is refused.
        TypeError: there is no option of that name.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default_factory=dict, hash=False)
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int = 128
    min_tokens: int = 0
    logprobs: int | None = None
    policy: Mapping[str, float | bool] = field(default_factory=dict, hash=False)
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Checks what does not depend on the model."""
        for name in OFF:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _option(name, value))
        for name in ("presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, _option(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r}: must be true or false")
        maximum = self.max_tokens
        _require_int("n", self.n, 1, 16, "an integer from 1 to 16")
        _require_int("max_tokens", maximum, 1, math.inf, "an integer of at least 1")
        rule = f"an integer from 0 to max_tokens, which is {maximum}"
        _require_int("min_tokens", self.min_tokens, 0, maximum, rule)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**63 - 1, "an integer from 0 to 2^63 - 1")
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, 20, "None or an integer from 0 to 20")
        if not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt={self.cache_salt!r}: must be a string")
        if not isinstance(self.policy, Mapping):
            raise ValueError(f"policy={self.policy!r}: must map names to values")
        object.__setattr__(self, "policy", dict(self.policy))
        for name, check, none in (
            ("logit_bias", _biases, {}),
            ("stop", _stop_strings, ()),
            ("stop_token_ids", _ids, ()),
        ):
            given = getattr(self, name)
            object.__setattr__(self, name, check(none if given is None else given))

    @property
    def greedy(self) -> bool:
        """Returns whether the likeliest token is taken as it is; only for checked requests."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == self.frequency_penalty == 0
            and not self.logit_bias
            and self.min_tokens == 0
        )


SamplingParams.__init__ = takes(SAMPLING)(SamplingParams.__init__)


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
    def max_length(self) -> int:
        """Returns the most tokens that prompt and answer can have together."""
        return len(self.ids) + self.sampling.max_tokens


def requests(
    params: "Params",
    rows: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    policy: "Policy",
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
    given = per_prompt(sampling, len(rows))
    return [
        _request(params, ids, own, policy, seed, row)
        for row, (ids, own) in enumerate(zip(rows, given, strict=True))
    ]


def per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams], prompts: int
) -> Sequence[SamplingParams]:
    """Returns the options of each prompt.

    Raises:
        ValueError: there is not one entry per prompt.
    """
    given = _listed(sampling)
    if isinstance(sampling, SamplingParams):
        given = [sampling] * prompts
    if len(given) != prompts:
        raise ValueError(
            f"sampling has {len(given)} entries: must have one for each of the {prompts} prompt(s)"
        )
    return given


def require_alone(sampling: SamplingParams | Sequence[SamplingParams]) -> None:
    """Refuses what only an engine gives: several answers, log-probabilities of likeliest tokens.

    Raises:
        ValueError: it is asked for, or `sampling` is neither SamplingParams nor a list of them.
    """
    for own in _listed(sampling):
        if own.n != 1:
            raise ValueError(f"n={own.n}: must be 1 for generate; jsparse.LLM takes more")
        if own.logprobs:
            raise ValueError(
                f"logprobs={own.logprobs}: must be None or 0 for generate; jsparse.LLM takes more"
            )


def _listed(sampling: Any) -> Sequence[SamplingParams]:
    given = sampling if isinstance(sampling, Sequence) else [sampling]
    for own in given:
        if not isinstance(own, SamplingParams):
            raise ValueError(f"sampling={own!r}: must be SamplingParams, or a list of them")
    return given


def _request(
    params: "Params",
    ids: list[int],
    sampling: SamplingParams,
    policy: "Policy",
    seed: int,
    row: int,
) -> Request:
    from jsparse.builder import require_knob

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
    last = params.config.vocab_size - 1
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(sampling, name):
            if token > last:
                raise ValueError(f"{name}={token}: must be token ids from 0 to {last}")
    defaults = OFF | {k: v for k, v in params.generation_defaults.items() if k in OFF}
    chosen = {name: getattr(sampling, name) for name in OFF}
    own_seed = sampling.seed is not None
    resolved = replace(
        sampling,
        **{name: defaults[name] if value is None else value for name, value in chosen.items()},
        seed=sampling.seed if own_seed else seed,
    )
    ends = _ends(params, sampling)
    if sampling.min_tokens and len(ends) > MAX_END_IDS:
        raise ValueError(
            f"min_tokens={sampling.min_tokens}: must be 0 where more than {MAX_END_IDS} tokens end "
            f"the text; here {len(ends)} do"
        )
    return Request(ids, resolved, ends, 0 if own_seed else row)


def _ends(params: "Params", sampling: SamplingParams) -> frozenset[int]:
    own = () if sampling.ignore_eos else end_tokens(params)
    return frozenset((*(sampling.stop_token_ids or ()), *own))


def knobs(asked: Sequence[Request]) -> "dict[str, Array] | None":
    """Returns the hyper-parameters that some request sets, each with a number per row.

    Rows that do not set one have NaN, which leaves them the policy's own. `dense` is a flag.
    """
    import jax.numpy as jnp

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


def knob_row(request: Request, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the hyper-parameters of `names` that a request sets, one row each; others are NaN."""
    own = request.sampling.policy
    return {
        name: np.array([own.get(name, False)])
        if name == "dense"
        else np.array([own.get(name, np.nan)], np.float32)
        for name in names
    }


def default_sampling(params: "Params") -> SamplingParams:
    """Returns SamplingParams with the model's own defaults in place of None."""
    stated = params.generation_defaults
    return SamplingParams(**{name: stated[name] for name in OFF if name in stated})


def end_tokens(params: "Params") -> frozenset[int]:
    """Returns the model's own end tokens."""
    named = params.generation_defaults.get("eos_token_id")
    if named is None:
        return frozenset(params.tokenizer.eos_token_ids if params.tokenizer else ())
    return frozenset(named if isinstance(named, Sequence) else [named])


def _option(name: str, value: Any) -> Any:
    if not _is_number(value):
        raise ValueError(f"{name}={value!r}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: must be a number that fits in a float") from None
    number = int(value) if isinstance(value, Integral) else number
    ok, rule = {
        "temperature": (number >= 0, "a number of at least 0 (0 is greedy)"),
        "top_k": (
            number >= -1 and number % 1 == 0,
            "an integer of at least 0 (0 and -1 are off)",
        ),
        "top_p": (0 < number <= 1, "a number above 0 and at most 1 (1 is off)"),
        "min_p": (0 <= number <= 1, "a number from 0 to 1 (0 is off)"),
        "repetition_penalty": (number > 0, "a number above 0 (1 is off)"),
        "presence_penalty": (-2 <= number <= 2, "a number from -2 to 2 (0 is off)"),
        "frequency_penalty": (-2 <= number <= 2, "a number from -2 to 2 (0 is off)"),
    }[name]
    if not ok or (name != "top_k" and number > FLOAT32_MAX):
        raise ValueError(f"{name}={value!r}: must be {rule}")
    return max(number, 0) if name == "top_k" else number


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


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias={biases!r}: must map token ids to numbers")
    if len(biases) > MAX_BIASES:
        raise ValueError(f"logit_bias has {len(biases)} entries: must have at most {MAX_BIASES}")
    made: dict[int, float] = {}
    for key, bias in biases.items():
        token = _token_id(key)
        if token is None:
            raise ValueError(f"logit_bias={key!r}: must map token ids, integers from 0 on")
        if token in made:
            raise ValueError(f"logit_bias={key!r}: must name each token once")
        if not _is_number(bias) or not abs(bias) <= 100:
            raise ValueError(f"logit_bias={{{key!r}: {bias!r}}}: must be numbers from -100 to 100")
        made[token] = float(bias)
    return made


def _token_id(key: Any) -> int | None:
    if isinstance(key, str):
        # int() refuses thousands of digits, and no id has more than these
        return int(key) if re.fullmatch("[0-9]{1,18}", key) else None
    return int(key) if _is_int(key) and key >= 0 else None


def _require_int(name: str, value: Any, low: int, high: float, rule: str) -> None:
    if not _is_int(value) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be {rule}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
