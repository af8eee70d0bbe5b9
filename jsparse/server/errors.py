"""Defines ApiError, and the format of errors for clients, which is OpenAI's."""

import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from jsparse.engine.errors import EngineFull

MAX_VALUE_CHARS = 80
# the most characters of a message, which may repeat a client's input
MAX_MESSAGE_CHARS = 300
KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
# seconds after which a client may retry, and the statuses of such responses
RETRY_SECONDS, RETRIED = 1, (429, 503)


class ApiError(Exception):
    """An error that clients get, with its HTTP status and message.

    `param` is the argument's name, `code` a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        retry = {"Retry-After": str(RETRY_SECONDS)} if status in RETRIED else {}
        self.headers = {**retry, **(headers or {})}

    @property
    def body(self) -> dict[str, Any]:
        """The error as clients see it."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = KINDS.get(self.status, other)
        error = {"message": _cut(self.message), "type": kind}
        error |= {"param": self.param and _cut(self.param), "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a JSON response."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def as_api_error(error: Exception, names: Mapping[str, str]) -> ApiError:
    """Returns the response to an exception of the engine.

    A ValueError's message starts with an argument's name; `names` maps it to the request's field.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFull):
        return full(str(error))
    if isinstance(error, ValueError):
        word = re.match(r"\w*", str(error))
        assert word is not None
        code = "context_length_exceeded" if "max_model_len" in str(error) else None
        return ApiError(400, str(error), param=names.get(word[0]), code=code)
    # unexpected errors appear only in the log, since they may name files
    return ApiError(500, "the engine has failed", code="engine_error")


def full(message: str) -> ApiError:
    """Returns the refusal of a request that would have to wait too long."""
    return ApiError(429, message, code="too_many_requests")


def shown(value: Any) -> str:
    """Returns a value for messages, truncated if it is long."""
    text = repr(value[:MAX_VALUE_CHARS] if isinstance(value, str | list) else value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"
