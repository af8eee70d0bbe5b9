"""StructuredOutputsParams, what an output must consist of, and checks of its values."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, UInt32

# bounds on the time and memory that one request's grammar takes
MAX_CHARS, MAX_CHOICES = 2**17, 10_000
EVERY_TOKEN = np.uint32(2**32 - 1)  # a word of bits
FORMATS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an output must consist of, with the names that vLLM uses. Exactly one format is given.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression in the syntax of Rust's crate regex.
        choice: the possible outputs.
        grammar: a context-free grammar, in llguidance's variant of Lark or in llama.cpp's GBNF.
        json_object: True: any JSON object.
        disable_any_whitespace: whether JSON has no spaces and line breaks outside of strings.
            Otherwise it may have a space, or a line break and its indentation, between its parts.
        after_reasoning: whether the model may think first: text from <think>, which it writes or
            which ends the prompt, to </think> is free. "begun": the prompt ends inside of it.

    Raises:
        ValueError: no format or several are given, or a value is malformed or too long.
    """

    __no_type_check__: ClassVar[bool] = True  # errors name values and rules

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    after_reasoning: bool | Literal["begun"] = False

    def __post_init__(self) -> None:
        """Checks the format and its size."""
        given = self._given
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {' and '.join(given) or 'no format'}: must have one of "
                f"{', '.join(FORMATS)}"
            )
        name = given[0]
        value: Any = getattr(self, name)
        if not isinstance(self.disable_any_whitespace, bool):
            raise _wrong("disable_any_whitespace", self.disable_any_whitespace, "true or false")
        if not isinstance(self.after_reasoning, bool) and self.after_reasoning != "begun":
            raise _wrong("after_reasoning", self.after_reasoning, "true, false or 'begun'")
        if name == "choice":
            object.__setattr__(self, name, _choices(value))
        elif name == "json_object":
            if value is not True:
                raise _wrong(name, value, "true")
        elif not isinstance(value, str | Mapping if name == "json" else str):
            rule = "a JSON schema, as an object or as text" if name == "json" else "a string"
            raise _wrong(name, value, rule)
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise _wrong(name, value, "text without surrogates") from None
        if len(self.text) > MAX_CHARS:
            raise ValueError(
                f"structured_outputs.{name} has {len(self.text):,} characters: must have at most "
                f"{MAX_CHARS:,}"
            )

    @property
    def _given(self) -> list[str]:
        values = {name: getattr(self, name) for name in FORMATS}
        return [name for name, value in values.items() if value is not None and value is not False]

    @property
    def format(self) -> str:
        """The name of the format that is given."""
        return self._given[0]

    @property
    def text(self) -> str:
        """The value of the format as text; choices as a JSON list, objects as a schema."""
        value = getattr(self, self.format)
        if self.format == "json_object":
            return '{"type": "object"}'
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{self.format}: must be JSON ({error})") from None


def structured_outputs(given: Any) -> StructuredOutputsParams | None:
    """Returns what an option says, which may be a mapping with the names of the fields.

    Raises:
        ValueError: it is malformed.
    """
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"structured_outputs={reprlib.repr(given)}: must be StructuredOutputsParams, or their "
            "fields by name"
        )
    known = [each.name for each in fields(StructuredOutputsParams)]
    for name in given:
        if name not in known:
            shown = reprlib.repr(name).strip("'")
            raise ValueError(f"structured_outputs.{shown}: must be among {', '.join(known)}")
    return StructuredOutputsParams(**given)


def bits(ids: Sequence[int], vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """Returns a bit for each token, the lowest of the first word for id 0: is it among `ids`?"""
    flags = np.zeros(vocab_size, np.bool_)
    flags[[*ids]] = True
    return packed(flags)


def packed(flags: Bool[np.ndarray, "V"]) -> UInt32[np.ndarray, "words"]:
    """Returns flags as bits, that of id 0 lowest in the first word."""
    padded = np.pad(flags, (0, -flags.size % 32))
    return np.packbits(padded, bitorder="little").view(np.uint32)


def _choices(given: Any) -> tuple[str, ...]:
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if (
        not listed
        or not 0 < len(given) <= MAX_CHOICES
        or not all(isinstance(each, str) and each for each in given)
    ):
        rule = f"a list of 1 to {MAX_CHOICES:,} strings of at least one character"
        raise _wrong("choice", given, rule)
    return tuple(given)


def _wrong(name: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"structured_outputs.{name}={reprlib.repr(value)}: must be {rule}")
