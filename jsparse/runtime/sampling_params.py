"""SamplingParams, the options of a request, and checks of their values."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np

from jsparse.names import SAMPLING, takes
from jsparse.runtime.structured_outputs import StructuredOutputsParams, structured_outputs

FLOAT32_MAX = float(np.finfo(np.float32).max)
# widths of arrays in jsparse.runtime.sampling.RowSampling
MAX_BIASES, MAX_END_IDS = 300, 16
MAX_BAD_CHARS = 4096
# the value at which each option does nothing, for models without defaults of their own
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingParams:
    """The options of one request, with the names that vLLM uses.

    Options change the logits in this order: allowed_token_ids, structured_outputs or bad_words,
    logit_bias, min_tokens, repetition_penalty, presence_penalty and frequency_penalty, temperature,
    top_k, top_p, min_p. At temperature 0 the most likely token after the penalties is chosen. None
    for an option from temperature to repetition_penalty means the value in the model's
    generation_config, else off.

    Attributes:
        temperature: the sampling temperature; 0: greedy.
        top_k: the number of most likely tokens to keep; 0 and -1: off.
        top_p: the total probability of the most likely tokens to keep; 1: off.
        min_p: the least probability to keep, relative to the most likely token's; 0: off.
        repetition_penalty: the factor that divides positive and multiplies negative logits of
            tokens in the prompt or generated so far; 1: off.
        presence_penalty: the number, from -2 to 2, that is subtracted from the logit of each token
            generated so far; tokens of the prompt do not count.
        frequency_penalty: the number, from -2 to 2, that is subtracted from a token's logit for
            each time it was generated.
        logit_bias: numbers from -100 to 100 that are added to logits, by token id; at most 300. Ids
            may be strings of digits, as in JSON.
        allowed_token_ids: the only tokens that may be generated; None: all. End tokens must be
            among them to end the text.
        structured_outputs: what the text must consist of, such as a JSON schema or a regular
            expression; None: anything. A mapping has the names of StructuredOutputsParams. The text
            ends where it is complete and nothing can follow, or at max_tokens, then incomplete.
        bad_words: strings that the text must not contain, not even within words; at most 4,096
            characters together. Not with allowed_token_ids or structured_outputs.
        n: the number of sequences to generate, from 1 to 16; `generate` supports only 1.
        seed: the random seed; the same seed gives the same text, whatever else is in the batch.
            None: derived from the seed of the call, differently for each prompt.
        stop: strings that end the text and are cut off.
        include_stop_str_in_output: whether the stop string stays in the text.
        skip_special_tokens: whether to leave special tokens out of the text, except one that ends
            it.
        stop_token_ids: ids that end the text, in addition to the model's own end tokens.
        ignore_eos: whether to generate past the model's own end tokens.
        max_tokens: the maximum number of tokens to generate.
        min_tokens: the number of tokens before which nothing ends the text: no end token can be
            chosen, and a stop string counts only if a later token completes it.
        logprobs: the number of most likely tokens, up to 20, with log-probabilities to return at
            each position, besides the generated token; 0: the generated token only; None: none.
            `generate` accepts None and 0.
        prompt_logprobs: the same for the tokens of the prompt, each after those before it, in
            `RequestOutput.prompt_logprobs`. Such a prompt is computed alone and as a whole,
            although a prefix of it may be cached. `generate` accepts only None.
        priority: the prompts of requests with a smaller number are prefilled first, also before
            the rest of a prompt in prefill; the default is 0. Others may wait for as long as such
            requests arrive. Decoding is never interrupted. `generate` accepts only 0.
        policy: hyper-parameters of the policy for this prompt: any that the policy lists in
            `per_row`, such as {"p": 0.9}, and {"dense": True} to attend to everything.
        exact: the engine's own `exact`, for requests that rely on it: another value is refused,
            unless the policy is dense. `generate` has its own argument for it.
        cache_salt: a secret shared by users who may share prefixes: an engine's prefix cache serves
            only requests with the same salt, so that the number of cached tokens reveals nothing
            about other users' prompts.

    For logit_bias, stop and stop_token_ids, None means empty. Other options of vLLM's are refused
    by name (jsparse.names).

    Raises:
        ValueError: a value is out of range, or an option is refused.
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
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = field(
        default=None, hash=False
    )
    bad_words: Sequence[str] | None = ()
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
    prompt_logprobs: int | None = None
    priority: int = 0
    policy: Mapping[str, float | bool] = field(default_factory=dict, hash=False)
    exact: bool | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Checks the options that do not depend on the model."""
        for name in OFF:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _option(name, value))
        for name in ("presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, _option(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r}: must be true or false")
        if self.exact is not None and not isinstance(self.exact, bool):
            raise ValueError(f"exact={self.exact!r}: must be true, false or None")
        maximum = self.max_tokens
        _require_int("n", self.n, 1, 16, "an integer from 1 to 16")
        _require_int("max_tokens", maximum, 1, math.inf, "an integer of at least 1")
        rule = f"an integer from 0 to max_tokens, which is {maximum}"
        _require_int("min_tokens", self.min_tokens, 0, maximum, rule)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**63 - 1, "an integer from 0 to 2^63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            if (number := getattr(self, name)) is not None:
                _require_int(name, number, 0, 20, "None or an integer from 0 to 20")
        low, high = -(2**31), 2**31 - 1
        _require_int("priority", self.priority, low, high, f"an integer from {low} to {high}")
        if not isinstance(self.cache_salt, str) or not _is_unicode(self.cache_salt):
            raise ValueError(f"cache_salt={self.cache_salt!r}: must be a string without surrogates")
        if not isinstance(self.policy, Mapping):
            raise ValueError(f"policy={self.policy!r}: must map names to values")
        object.__setattr__(self, "policy", dict(self.policy))
        for name, check, none in (
            ("logit_bias", _biases, {}),
            ("stop", partial(_strings, "stop"), ()),
            ("bad_words", partial(_strings, "bad_words"), ()),
            ("stop_token_ids", partial(_ids, "stop_token_ids"), ()),
        ):
            given = getattr(self, name)
            object.__setattr__(self, name, check(none if given is None else given))
        wanted = structured_outputs(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", wanted)
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not allowed or wanted is not None:
                rule = "of at least one id" if not allowed else "None with structured_outputs"
                raise ValueError(f"allowed_token_ids={[*allowed]}: must be {rule}")
        if words := self.bad_words:
            if wanted is not None or self.allowed_token_ids is not None:
                raise ValueError(
                    f"bad_words={[*words]}: must be empty with structured_outputs or "
                    "allowed_token_ids"
                )
            if (size := sum(map(len, words))) > MAX_BAD_CHARS:
                raise ValueError(
                    f"bad_words has {size} characters: must have at most {MAX_BAD_CHARS} together"
                )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen unchanged; valid only for checked requests."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == self.frequency_penalty == 0
            and not self.logit_bias
            and self.min_tokens == 0
            and self.allowed_token_ids is None
            and self.structured_outputs is None
            and not self.bad_words
        )


SamplingParams.__init__ = takes(SAMPLING)(SamplingParams.__init__)


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


def _strings(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, Sequence):
        raise ValueError(f"{name}={given!r}: must be a string or a list of strings")
    texts = (given,) if isinstance(given, str) else tuple(given)
    for text in texts:
        if not isinstance(text, str) or not text or not _is_unicode(text):
            raise ValueError(
                f"{name}={list(texts)!r}: must be strings of at least one character without "
                "surrogates"
            )
    return texts


def _ids(name: str, tokens: Any) -> tuple[int, ...]:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise ValueError(f"{name}={tokens!r}: must be a list of token ids")
    for token in tokens:
        if not _is_int(token) or token < 0:
            raise ValueError(f"{name}={token!r}: must be token ids, integers from 0 on")
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
        # int() refuses thousands of digits; no id has more than 18
        return int(key) if re.fullmatch("[0-9]{1,18}", key) else None
    return int(key) if _is_int(key) and key >= 0 else None


def _require_int(name: str, value: Any, low: int, high: float, rule: str) -> None:
    if not _is_int(value) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be {rule}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_unicode(text: str) -> bool:
    """Returns whether UTF-8 can encode a string: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
