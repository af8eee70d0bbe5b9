"""Renders chat messages as model input text, with the model's chat template.

A template is code from a checkpoint, so it runs in Jinja's sandbox, with access only to the
variables that it is given.
"""

import functools
import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    import jinja2

MAX_LEVELS = 64  # of nested lists and dicts
PART = {"type", "text"}
# hints to other servers, which do not affect the text
HINTS = {"cache_control"}


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Renders `messages` with a Jinja chat template and further variables, such as tools.

    Raises:
        ValueError: the messages are malformed, or the template is broken, rejects them or violates
            the sandbox.
    """
    _check_messages(messages)
    try:
        return _compile(template).render({**variables, "messages": messages})
    # The template's own operations can raise anything (KeyError, ZeroDivisionError, ...), not only
    # Jinja's errors.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"chat_template: failed with {type(error).__name__}: {reason}") from error


def read_template(path: str | os.PathLike[str]) -> str:
    """Returns the template in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a Jinja template.
    """
    from jinja2 import TemplateSyntaxError

    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"chat_template={str(path)!r}: must be a file with a Jinja template"
        )
    try:
        template = file.read_text(encoding="utf-8")
        _compile(template)
    except (UnicodeDecodeError, TemplateSyntaxError) as error:
        raise ValueError(
            f"chat_template={str(path)!r}: must be a Jinja template: {error}"
        ) from None
    return template


class ChatOptions(NamedTuple):
    """What a chat prompt asks of the template besides its messages.

    Attributes:
        add_generation_prompt: whether the model starts a message; None: unless it continues one.
        continue_final_message: whether the model continues the last message.
        chat_template_kwargs: the template's own variables, such as {"enable_thinking": False}.
        tools: functions that the model may call, {"type": "function", "function": {"name": …,
            "description": …, "parameters": a JSON schema}}.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({})
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def generates(self) -> bool:
        """Whether the text ends with the start of the assistant's message."""
        added = self.add_generation_prompt
        return not self.continue_final_message if added is None else added


PLAIN_CHAT = ChatOptions()
SETS = {"messages", "add_generation_prompt", "continue_final_message", "tools"}
"""The variables of a template that other options set."""


def variables(options: ChatOptions, template: str) -> dict[str, Any]:
    """Returns the variables that a template gets from `chat_template_kwargs` and `tools`.

    A variable that the template lacks may only be false or None, which asks for nothing.

    Raises:
        ValueError: an option is invalid, or asks for what the template cannot do.
    """
    added, continued, given, tools = options
    for name, value in (("add_generation_prompt", added), ("continue_final_message", continued)):
        if not isinstance(value, bool | None):
            raise ValueError(f"{name}={value!r}: must be True or False")
    if added and continued:
        raise ValueError(
            "continue_final_message=True: must not be given with add_generation_prompt=True"
        )
    if not isinstance(given, Mapping) or not is_json(given):
        shown = reprlib.repr(given)
        raise ValueError(f"chat_template_kwargs={shown}: must be a dict of what JSON can hold")
    read = _variables(template)
    own = read - SETS
    for name, value in given.items():
        shown = f"chat_template_kwargs={{{name!r}: {reprlib.repr(value)}}}"
        if name in SETS:
            raise ValueError(f"{shown}: must not set {name}, which has its own option")
        if value and name not in own:
            others = f"it has {', '.join(sorted(own))}" if own else "it has none"
            raise ValueError(f"{shown}: must be a variable of the chat template, and {others}")
    found = {name: value for name, value in given.items() if name in own}
    if not tools:
        return found
    _check_tools(tools)
    if "tools" not in read:
        raise ValueError(f"tools={reprlib.repr(tools)}: the chat template of the model takes none")
    return found | {"tools": [*tools]}


def _check_tools(tools: Any) -> None:
    """Raises ValueError if tools are not functions as OpenAI describes them."""
    shape = "{'type': 'function', 'function': {'name': …}}, of what JSON can hold"
    for index, tool in enumerate(tools if isinstance(tools, Sequence) else [tools]):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        named = isinstance(name, str) and bool(name)
        if not named or tool.get("type") != "function" or not is_json(tool):
            raise ValueError(f"tools[{index}]={reprlib.repr(tool)}: must be {shape}")


def is_json(value: Any, levels: int = MAX_LEVELS) -> bool:
    """Returns whether JSON can hold a value, in at most this number of levels."""
    if isinstance(value, Mapping | list | tuple) and not levels:
        return False
    if isinstance(value, Mapping):
        names, inner = all(isinstance(name, str) for name in value), value.values()
        return names and all(is_json(each, levels - 1) for each in inner)
    if isinstance(value, list | tuple):
        return all(is_json(each, levels - 1) for each in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool | int)


def joined(content: Any) -> str:
    """Returns a message's text, which may consist of parts {"type": "text", "text": …}.

    A part may also have `cache_control`, and keys with None or empty values. The message of the
    ValueError is the violated rule.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be text, or a list of parts of type text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"has a part of type {reprlib.repr(kind)}: must be parts with type 'text' and a "
                "text; images and audio are not supported"
            )
        for key, value in part.items():
            if key not in PART | HINTS and value not in (None, [], {}):
                raise ValueError(
                    f"has a part with the key {reprlib.repr(key)}: must have only type and text"
                )
    return "".join(part["text"] for part in content)


def normalised(messages: Any) -> Any:
    """Returns messages in the form that templates take; `render` checks the rest.

    Parts of a content become one text, the arguments of calls objects, and a message of calls alone
    has an empty content.
    """
    plain = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            try:
                message = {**message, "content": joined(content)}
            except ValueError as error:
                raise ValueError(f"messages[{index}]['content'] {error}") from None
        if isinstance(message, Mapping) and "tool_calls" in message:
            message = dict(message)
            if calls := message.pop("tool_calls"):
                calls = _with_objects(calls, f"messages[{index}]['tool_calls']")
                message |= {"content": message.get("content") or "", "tool_calls": calls}
        plain.append(message)
    return plain


def _with_objects(calls: Any, where: str) -> list[Any]:
    """Returns calls with their arguments as objects; clients send them as JSON in a string."""
    made = []
    for index, call in enumerate(calls if isinstance(calls, list | tuple) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}[{index}] is {reprlib.repr(call)}; it must have a function with a name"
            )
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping) or not is_json(arguments):
            raise ValueError(
                f"{where}[{index}]['function']['arguments'] is {reprlib.repr(arguments)}; it must "
                f"be a JSON object of at most {MAX_LEVELS} levels"
            )
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages is {messages!r}; it must be a list with one message or more")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"messages[{index}] is {message!r}; it must be a dict with a role and a content"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"messages[{index}][{key!r}] is {message.get(key)!r}; it must be a string"
                )


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> "jinja2.Template":
    return _environment().from_string(template)


@functools.lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    """Returns the names of the variables that a template reads."""
    from jinja2 import TemplateSyntaxError, meta

    environment = _environment()
    try:
        found = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:
        return frozenset()  # `render` says what is wrong
    return frozenset(found - environment.globals.keys())


@functools.cache
def _environment() -> "jinja2.Environment":
    # imported here because most runs encode plain text and never need Jinja
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A no-op for {% generation %}, which marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012  as jinja declares it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any
) -> str:
    """Writes JSON without escaping <, > and & for HTML, as in models' training data."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
