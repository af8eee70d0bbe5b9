"""Defines Front, the base class of handlers behind the gate, and a server's Options."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from jsparse.engine.async_engine import MAX_WAITING
from jsparse.server.errors import ApiError, full, shown
from jsparse.server.origins import ANY
from jsparse.server.protocol import MAX_LOGPROBS

# a body may have this number of bytes per token of the longest prompt, and at least MIN_BODY
BYTES_PER_TOKEN, MIN_BODY = 32, 2**20
# larger bodies are parsed in a thread, and count towards MAX_LARGE_BODIES bytes in memory
PARSED_AT_ONCE = 2**16
MAX_LARGE_BODIES = 2**26
BODY_SECONDS = 60


@dataclass
class Options:
    """The options of a server that are not the engine's.

    Attributes:
        name: the model's name for clients.
        api_key: the key that clients must send, or None.
        max_waiting: the maximum number of requests that wait.
        max_logprobs: the maximum number of likely tokens that requests may ask for per token.
        default_max_tokens: the most tokens of replies to chats that set no number; None: all that
            fit.
        hosts: the names under which browsers may reach the server, lower-case; None: any.
        origins: the origins of pages that may use the server from a browser; "*": any.
        special_tokens: whether special tokens that are spelled in messages count as such.
        template_kwargs: the default variables of the chat template.
        splits_reasoning: whether replies to chats have their reasoning in a field of its own.
        tool_call_parser: the format of the model's calls; None: inferred from its chat template.
        aliases: further names of the model.
        drain_seconds: seconds that requests may still take when the server shuts down.
    """

    name: str
    api_key: str | None = None
    max_waiting: int = MAX_WAITING
    max_logprobs: int = MAX_LOGPROBS
    default_max_tokens: int | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()
    special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    splits_reasoning: bool = False
    tool_call_parser: str | None = None
    aliases: tuple[str, ...] = ()
    drain_seconds: float = 30.0

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return (self.name, *self.aliases)

    def foreign(self, headers: Headers) -> str | None:
        """Returns why a request must be refused if it names a foreign host, else None.

        Otherwise a page could bind its name to this machine's address (DNS rebinding).
        """
        for name in ("host", "origin") if self.hosts is not None else ():
            address = headers.get(name)
            if name == "origin" and self.origins & {address, ANY}:
                continue
            if address and _host_of(address) not in (self.hosts or ()):
                hosts = ", ".join(sorted(self.hosts or ()))
                return f"{name}={shown(address)}: must be among {hosts} (--allowed-host)"
        return None


class Front(ABC):
    """The base class of the handlers behind the gate: Service and Router.

    Attributes:
        draining: whether new requests are refused.
        created: when the server started, in seconds since 1970.
        inside: the number of HTTP requests in progress.
        buffered: the bytes of large bodies in memory.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.draining = options, False
        self.created = int(time.time())
        self.inside = self.buffered = 0

    @property
    @abstractmethod
    def unhealthy(self) -> str | None:
        """Why no request can be served, or None."""

    @property
    @abstractmethod
    def max_body_bytes(self) -> int:
        """The maximum number of bytes of a request's body."""

    @asynccontextmanager
    async def body_of(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """Reads the body of a request; a large one counts as buffered in the meantime.

        Raises:
            ApiError: it is too large, too slow, or not JSON by its type.
        """
        maximum = self.max_body_bytes
        sort = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sort != "application/json":
            # a foreign page in a browser needs a preflight request for this type, and that fails
            raise ApiError(415, f"Content-Type={sort!r}: must be 'application/json'")
        data, counted = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    if int(request.headers.get("content-length") or 0) > maximum:
                        raise _too_large(maximum)
                    async for piece in request.stream():
                        data += piece
                        if len(data) > maximum:
                            raise _too_large(maximum)
                        if len(data) > PARSED_AT_ONCE:
                            self.buffered, counted = self.buffered + len(data) - counted, len(data)
                            if self.buffered > max(maximum, MAX_LARGE_BODIES):
                                raise full("too many large bodies are arriving")
            except TimeoutError:
                message = f"the body took more than {BODY_SECONDS} s: must arrive sooner"
                raise ApiError(408, message, headers={"Connection": "close"}) from None
            yield bytes(data)
        finally:
            self.buffered -= counted


def max_body_bytes(tokens: int) -> int:
    """Returns the maximum number of bytes of a body whose prompt may have `tokens` tokens."""
    return max(MIN_BODY, tokens * BYTES_PER_TOKEN)


def _host_of(address: str) -> str | None:
    """Returns the host of a Host or Origin header, lower-case; None: no host."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname
    except ValueError:
        return None


def _too_large(maximum: int) -> ApiError:
    message = f"the body is too large: must have at most {maximum} bytes"
    return ApiError(413, message, headers={"Connection": "close"})
