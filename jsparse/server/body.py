"""Defines RequestBody, the base of JSON bodies, and parses them.

Unknown fields are refused by name.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from jsparse.names import SAMPLING
from jsparse.server.errors import ApiError, shown

# fields that other servers know
REFUSED = {
    **{name: refused.rule for name, refused in SAMPLING.items()},
    "audio": "audio is not supported",
    "chat_template": "a template from a request is never run: the model's own is used",
    "chat_template_kwargs": "the model's own template is used as it is",
    "documents": "documents are not supported: write them into a message",
    "function_call": "functions are not supported",
    "functions": "functions are not supported",
    "modalities": "answers are text alone",
    "parallel_tool_calls": "tools are not supported",
    "response_format": "structured output is not supported",
    "suffix": "text is continued, never filled in",
    "tool_choice": "tools are not supported",
    "tools": "tools are not supported",
}
# values that clients send without asking for anything; they are dropped
NOTHING_ASKED: dict[str, Any] = {
    **{name: refused.nothing for name, refused in SAMPLING.items()},
    "continuous_usage_stats": False,
    "include_obfuscation": False,
    "metadata": {},
    "parallel_tool_calls": False,
    "response_format": {"type": "text"},
    "store": False,
    "tool_calls": [],
    "tool_choice": "none",
    "tools": [],
}


def _asks_nothing(name: str, value: Any) -> bool:
    if value is None:
        return True
    # True is no 1
    known = name in NOTHING_ASKED and type(value) is type(NOTHING_ASKED[name])
    return known and value == NOTHING_ASKED[name]


class RequestBody(BaseModel):
    """Holds the JSON body of a request; nulls and fields that ask for nothing are dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, given: Any) -> Any:
        """Drops nulls, fields that ask for nothing, and all unknown fields but the first."""
        if not isinstance(given, dict):
            return given
        asked = {name: value for name, value in given.items() if not _asks_nothing(name, value)}
        unknown = next((name for name in asked if name not in cls.model_fields), None)
        return {
            name: value
            for name, value in asked.items()
            if name in cls.model_fields or name == unknown
        }


def parse[Body: RequestBody](kind: type[Body], data: bytes) -> Body:
    """Returns the body of a request.

    Raises:
        ApiError: it is malformed; the message names the field, its value and the rule.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where, rule = _place(first["loc"]), first["msg"].removeprefix("Value error, ")
    name = first["loc"][0] if first["loc"] else None
    if first["type"] == "extra_forbidden":
        rule = (
            REFUSED.get(str(name), "unknown field") if len(first["loc"]) == 1 else "unknown field"
        )
        message = f"{where}: {rule}"
    elif first["type"] == "missing":
        message = f"{where}: must be given"
    elif not where:  # the whole body, or a rule about several fields, which names them
        message, word = rule, rule.split("=")[0].split(":")[0]
        where = word if word in kind.model_fields else ""
    else:
        message = f"{where}={shown(first['input'])}: {rule}"
    raise ApiError(400, message, param=where or None)


def _place(loc: tuple[int | str, ...]) -> str:
    """Returns the place of an error, such as messages[0].content."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in ("bool", "float"):  # these are branches of a union
            place += f".{part}" if place else part
    return place
