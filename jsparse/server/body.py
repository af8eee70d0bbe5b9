"""Defines RequestBody, the base class of JSON bodies, and parses them.

Unknown fields are refused by name.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from jsparse.names import SAMPLING
from jsparse.server.errors import ApiError, shown

# fields of other servers
REFUSED = {
    **{name: refused.rule for name, refused in SAMPLING.items()},
    "audio": "audio is not supported",
    "chat_template": "templates from requests are never run: the model's own is used",
    "documents": "documents are not supported: write them into a message",
    "function_call": "functions are not supported",
    "functions": "functions are not supported",
    "modalities": "only text is generated",
    "suffix": "text is continued, never filled in",
    "tool_choice": "only chats have tools",
    "tools": "only chats have tools",
}
# values without effect, which some clients send; they are dropped
NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    **{name: (refused.nothing,) for name, refused in SAMPLING.items()},
    "annotations": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("auto",),
    "tools": ([],),
    "verbosity": ("medium",),
}


def _asks_nothing(name: str, value: Any) -> bool:
    # True does not count as 1
    nothing = NOTHING_ASKED.get(name, ())
    return value is None or any(type(value) is type(each) and value == each for each in nothing)


class RequestBody(BaseModel):
    """The JSON body of a request; nulls and fields without effect are dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, given: Any) -> Any:
        """Drops nulls, fields without effect, and all unknown fields but the first."""
        if not isinstance(given, dict):
            return given
        kept = {name: value for name, value in given.items() if not _asks_nothing(name, value)}
        unknown = next((name for name in kept if name not in cls.model_fields), None)
        return {
            name: value
            for name, value in kept.items()
            if name in cls.model_fields or name == unknown
        }


def parse[Body: RequestBody](kind: type[Body], data: bytes) -> Body:
    """Returns the body of a request; an ApiError names the field, its value and the rule."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = _foremost(error.errors(include_url=False))
    where, rule = _place(first["loc"]), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"{where}: {REFUSED.get(str(first['loc'][-1]), 'unknown field')}"
    elif first["type"] == "missing":
        message = f"{where}: must be given"
    elif not where:  # an error of the whole body, or a rule that names several fields
        message, word = rule, rule.split("=")[0].split(":")[0]
        where = word if word in kind.model_fields else ""
    else:
        message = f"{where}={shown(first['input'])}: {rule}"
    raise ApiError(400, message, param=where or None)


def _foremost(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Returns the error to report: the first, unless a refused field explains a missing one."""
    first = errors[0]
    if first["type"] == "missing":
        for each in errors[1:]:
            beside = each["type"] == "extra_forbidden" and each["loc"][:-1] == first["loc"][:-1]
            if beside and each["loc"][-1] in REFUSED:
                return each
    return first


def _place(loc: tuple[int | str, ...]) -> str:
    """Returns the place of an error, such as messages[0].content."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in ("bool", "float", "tool", "word"):  # these are branches of a union
            place += f".{part}" if place else part
    return place
