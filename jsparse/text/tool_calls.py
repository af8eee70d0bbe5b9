"""Parses tool calls in the output of models that were given tools.

There are two formats. Hermes, Qwen2.5 and Qwen3 write each call between <tool_call> and
</tool_call>, after any text:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Llama 3 writes only calls, separated by semicolons, and names their arguments "parameters".
"""

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from json import JSONDecodeError, JSONDecoder
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from jsparse.models.chat_template import is_json
from jsparse.text.reasoning import held_from

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  # precedes the calls of some Llama models
MAX_ENDS = 32  # ENDs tried for one call, whose strings may contain them


class ToolCall(NamedTuple):
    """A call: the function's name, and its arguments, a JSON object as text."""

    name: str
    arguments: str


class Reply(NamedTuple):
    """An output in two parts: the text for the user, and the calls in order."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def split_tool_calls(text: str, parser: str = "hermes") -> Reply:
    """Splits a whole text.

    Args:
        text: a model's output, without its reasoning.
        parser: the model's format, "hermes" or "llama3_json".

    Returns:
        The text without calls, and the calls. A call without a name, or that is not valid JSON,
        stays in the text.

    Raises:
        ValueError: there is no such parser.
    """
    if parser not in PARSERS:
        raise ValueError(f"parser={parser!r}: must be {' or '.join(map(repr, PARSERS))}")
    return PARSERS[parser]().push(text, ended=True)


def parser_of(template: str) -> str | None:
    """Returns the name of the parser for a model with this chat template; None: unknown."""
    if BEGIN in template:
        # some models write XML between the tags
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    llama = "tool_calls" in template and '"parameters": ' in template
    return "llama3_json" if llama else None


def calls_only(
    parser: str, tools: Sequence[Mapping[str, Any]], *, several: bool, special_tags: bool
) -> str:
    """Returns a grammar of outputs that are calls and nothing else.

    Args:
        parser: the model's format.
        tools: the tools that may be called, in OpenAI's format.
        several: whether there may be more than one call.
        special_tags: whether the tags of "hermes" are special tokens.

    Raises:
        ValueError: the parameters of a tool are not those of an object.
    """
    name_arguments = "arguments" if parser == "hermes" else "parameters"
    rules = [
        f"call_{nth}: %json " + json.dumps(_schema(tool["function"], name_arguments, nth))
        for nth, tool in enumerate(tools)
    ]
    begin, end, between = "", "", '"; "'
    if parser == "hermes":
        tags = (BEGIN, END) if special_tags else (f'"{BEGIN}"', f'"{END}"')
        begin, end, between = f'{tags[0]} "\\n" ', f' "\\n" {tags[1]}', '"\\n"'
    more = f" ({between} call)*" if several else ""
    any_call = " | ".join(f"call_{nth}" for nth in range(len(tools)))
    return "\n".join([f"start: call{more}", f"call: {begin}({any_call}){end}", *rules])


def _schema(function: Mapping[str, Any], name_arguments: str, nth: int) -> dict[str, Any]:
    """Returns the JSON schema of the calls of a function.

    Arguments beside the listed ones are allowed only if the schema of the parameters says so.
    """
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        name = f"tools[{nth}].function.parameters"
        raise ValueError(f"{name}={reprlib.repr(parameters)}: must be the schema of an object")
    # with a name of their own, their references are relative to themselves
    own: dict[str, Any] = {"$id": f"tool:///{nth}", "type": "object"}
    if "properties" in parameters:
        own["additionalProperties"] = False
    parameters = own | dict(parameters)
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            name_arguments: parameters,
        },
        "required": ["name", name_arguments],
        "additionalProperties": False,
        # as models write calls; keywords that cannot be followed are ignored unless strict
        "x-guidance": {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
            "lenient": not function.get("strict"),
        },
    }


class ToolCallParser(ABC):
    """Splits a text that arrives in pieces."""

    @abstractmethod
    def push(self, text: str, *, ended: bool) -> Reply:
        """Returns the two parts of a further piece.

        Args:
            text: the piece; text that may belong to a call is held back until it is known.
            ended: whether the text ends with it.
        """


class HermesParser(ToolCallParser):
    """Parses calls between tags. Spaces around calls are dropped."""

    def __init__(self) -> None:
        self._held, self._inside = "", False
        self._spaces = ""  # before the last BEGIN
        self._said = self._called = False  # whether there was text, and whether a call came last
        self._searched = self._ends = 0  # characters of a call, and ENDs in them, that end none

    def push(self, text: str, *, ended: bool) -> Reply:
        self._held += text
        said, calls = "", []
        while True:
            if not self._inside:
                said += self._outside(ended)
                if not self._inside:
                    return Reply(said, tuple(calls))
            at = self._held.find(END, self._searched)
            if at < 0 and not ended:
                self._searched = max(len(self._held) - len(END) + 1, 0)
                return Reply(said, tuple(calls))
            # a text may end without the last tag
            at, after = (at, at + len(END)) if at >= 0 else (len(self._held), len(self._held))
            found, in_string = _loaded(self._held[:at])
            if in_string and at < after and self._ends < MAX_ENDS:
                self._searched, self._ends = after, self._ends + 1
                continue
            call = as_call(found)
            if call is None:
                said += self._spaces + BEGIN + self._held[:after]
                self._said = True
            else:
                calls.append(call)
            self._called = call is not None
            self._held, self._inside = self._held[after:], False
            self._searched = self._ends = 0

    def _outside(self, ended: bool) -> str:
        """Returns the text before the next call, and holds back what follows."""
        before, found, after = self._held.partition(BEGIN)
        if found:
            text, self._held, self._inside = before.rstrip(), after, True
            self._spaces = before[len(text) :]
        else:
            at = len(self._held) if ended else held_from(self._held, BEGIN)
            text, self._held = self._held[:at], self._held[at:]
        if self._called and (not self._said or not text.strip()):
            text = text.lstrip()
        if text:
            self._said, self._called = True, False
        return text


class LlamaParser(ToolCallParser):
    """Parses outputs that consist of calls alone, which only their end shows."""

    def __init__(self) -> None:
        self._held, self._may_call = "", True

    def push(self, text: str, *, ended: bool) -> Reply:
        self._held += text
        if self._may_call:
            begun = self._held.lstrip()
            tagged = PYTHON_TAG.startswith(begun[: len(PYTHON_TAG)])
            self._may_call = tagged or begun.startswith("{")
        if self._may_call and not ended:
            return Reply("")
        calls = _all_calls(self._held) if self._may_call else ()
        said, self._held = "" if calls else self._held, ""
        return Reply(said, calls)


def _all_calls(text: str) -> tuple[ToolCall, ...]:
    """Returns the calls of a text that consists of calls alone, or none."""
    rest, calls = text.strip().removeprefix(PYTHON_TAG).strip(), []
    while rest:
        try:
            found, end = _JSON.raw_decode(rest)
        except (ValueError, RecursionError):
            return ()
        call = as_call(found)
        # an answer in JSON may have a name too
        if call is None or not found.keys() & {"arguments", "parameters"}:
            return ()
        calls.append(call)
        rest = rest[end:].lstrip("; \n")
    return tuple(calls)


def as_call(found: Any) -> ToolCall | None:
    """Returns a decoded JSON value as a call, or None if it is not one."""
    name = found.get("name") if isinstance(found, Mapping) else None
    if not isinstance(name, str) or not name or not _is_text(name):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, Mapping) or not is_json(arguments):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    # a string may have half of a surrogate pair, which only an escape can write
    return ToolCall(name, text if _is_text(text) else json.dumps(arguments))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _loaded(text: str) -> tuple[Any, bool]:
    """Returns decoded JSON, or None, and whether the text ends inside a string."""
    try:
        return _JSON.decode(text.strip()), False
    except JSONDecodeError as error:
        return None, error.msg.startswith(("Unterminated string", "Invalid \\uXXXX escape"))
    except (ValueError, RecursionError):
        return None, False


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


# no NaN and infinities, but line breaks in strings, which models forget to escape
_JSON = JSONDecoder(parse_constant=_refuse, strict=False)
PARSERS: Mapping[str, type[ToolCallParser]] = MappingProxyType(
    {"hermes": HermesParser, "llama3_json": LlamaParser}
)
