"""Sends requests to a replica over its Unix socket, by HTTP/1.1.

One process relays the tokens of all replicas, so the work per token must be small: there is only a
parser between a socket and the reader of its pieces, and pieces that arrive together are joined. A
connection serves one request. Replicas send a response's length, or chunks: a response that ends
with its connection counts as lost.
"""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Self, cast
from urllib.parse import quote

from httptools import HttpParserError, HttpResponseParser

from jsparse.engine.errors import EngineError
from jsparse.server.errors import ApiError

# the number of unread bytes at which a replica must wait; data in flight comes on top
MAX_BYTES = 2**16
# seconds between two attempts to connect to a replica whose backlog is full
RETRY_SECONDS = 0.01


class Lost(EngineError):
    """A replica has ended, or its engine has failed."""


class ReplicaResponse(asyncio.Protocol):
    """A replica's response while it arrives, and its connection; header names are lower-case."""

    def __init__(self, request: bytes) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._request, self._parser = request, HttpResponseParser(self)
        self._come: list[bytes] = []
        self._size = 0
        # `_news` is set while there is data to read, or no more will arrive
        self._whole, self._lost, self._news = False, False, asyncio.Event()

    @classmethod
    async def to(cls, path: Path, method: str, target: str, body: bytes | None = None) -> Self:
        """Sends a request to the replica at this socket; returns its response, which is to arrive.

        Raises:
            Lost: no process listens.
            ApiError: this process cannot connect, for instance without free file descriptors.
        """
        head = f"{method} {quote(target)} HTTP/1.1\r\nHost: replica\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"{head}\r\n".encode() + (body or b"")
        connect = asyncio.get_running_loop().create_unix_connection
        while True:
            try:
                _, response = await connect(lambda: cls(request), str(path))
                return response
            except BlockingIOError:  # the replica's backlog is full
                await asyncio.sleep(RETRY_SECONDS)
            except (ConnectionRefusedError, ConnectionResetError, FileNotFoundError) as error:
                raise Lost(f"{error!r}") from None
            except OSError as error:
                raise ApiError(503, "the server is full", code="unavailable") from error

    async def begun(self) -> bytes:
        """Waits for the first part of the body, or its end, and returns it; Lost: there is none."""
        await self._news.wait()
        if not (self._come or self._whole):
            raise Lost("the connection was lost")
        return b"".join(self._come)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yields the body as it arrives; all data since the last piece is one piece."""
        while True:
            await self._news.wait()
            if self._come:
                piece, waits = b"".join(self._come), self._size > MAX_BYTES
                self._come.clear()
                self._size = 0
                if not (self._whole or self._lost):
                    self._news.clear()
                if waits and not self._transport.is_closing():
                    self._transport.resume_reading()
                yield piece
            elif self._whole:
                return
            else:
                raise Lost("the connection was lost")

    def close(self) -> None:
        """Closes the connection; the replica then aborts an unfinished request."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parses a part of the response; bytes after its end are ignored."""
        if self._whole:
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._transport.abort()  # the response counts as lost
        if self._size > MAX_BYTES:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._news.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._come.append(body)
        self._size += len(body)
        self._news.set()

    def on_message_complete(self) -> None:
        self._whole = True
        self._news.set()
