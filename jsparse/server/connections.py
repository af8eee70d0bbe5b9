"""Bounds the memory and time of connections, whether or not their clients have a key."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jsparse.server.descriptors import Room
from jsparse.server.errors import ApiError

# the most bytes of a head, which may be a quarter of a MiB longer: the last read is not counted
MAX_BYTES = 2**16
# seconds within which a client must send a whole head, or read MIN_READ of its response
SECONDS = 60
# bytes of a response to be read in that time
MIN_READ = 2**16
# closes a socket at once and drops unsent data
DROP = struct.pack("ii", 1, 0)


class BoundedConnection(HttpToolsProtocol):
    """A connection that closes if its client sends too much or too little, or does not read.

    A request that arrives during the previous response is refused: the connection closes after that
    response, and the client may retry (RFC 9112, section 9.3.2). So a disconnected client is
    noticed at once. If there are too many connections, the one idle for longest is closed. After a
    response that precedes the end of its request, at first only the sending side closes: closing a
    socket with unread bytes would reset the connection (RFC 9112, section 9.6).
    """

    _moved, _bytes, _unsent, _since = False, 0, 0, 0.0
    _deaf = False  # whether further data is ignored
    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, room: Room, **options: Any) -> None:
        super().__init__(*args, **options)
        self._room = room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._watch()
        if len(self.connections) > self._room.most:
            # closing connections are briefly among them
            alive = [each for each in self._all if not each.transport.is_closing()]
            idle = (each for each in alive if not each._responding)
            if len(alive) > self._room.most:
                min(idle, key=lambda each: each._since)._drop()
                self._room.count_closed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses data, and counts bytes that neither end a head nor belong to a body."""
        if self._deaf:
            return
        self._moved = False
        self._unset_keepalive_if_required()
        self._take(data)
        if self._moved or self._deaf or self.transport.is_closing():
            return
        self._bytes += len(data)
        if self._bytes > MAX_BYTES:
            self.send_400_response(f"The head is too large: must have at most {MAX_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Starts the request, unless it came too early or offers another protocol."""
        if self._responding:
            self._stop_listening()
        if not (self._deaf or self._offers):
            self._unwatch()
            self._move()
            super().on_headers_complete()
            self.cycle.transport = _ResponseTransport(self)  # pyright: ignore[reportAttributeAccessIssue]

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            self._move()
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._deaf or self._offers):
            self._move()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Waits for the next request, or until the client has read the response."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Waits until the client reads; the application also waits."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._responding:
            self._unwatch()

    def send_400_response(self, msg: str) -> None:
        """Refuses malformed HTTP, in OpenAI's format."""
        if self._responding and not self.cycle.more_body:
            self._stop_listening()
            return
        body = orjson.dumps(ApiError(400, msg).body)
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-content-type-options: nosniff\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.hang_up()
        self._watch()

    def hang_up(self) -> None:
        """Ends sending; the connection closes once the client has closed it, or after a timeout."""
        body_complete = self.cycle is not None and not self.cycle.more_body
        if body_complete or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self._deaf = True
            self.transport.write_eof()

    @property
    def _all(self) -> Iterator["BoundedConnection"]:
        return (each for each in self.connections if isinstance(each, BoundedConnection))

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _offers(self) -> bool:
        """Whether the request offers to switch to another protocol, such as h2c."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _take(self, data: bytes) -> None:
        """Parses data; a request that offers another protocol is parsed again without the offer.

        The parser stops at the offer, which a server may ignore (RFC 9110, section 7.8).
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._deaf and self._offers:
                version = self.parser.get_http_version().encode()
                head = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
                for name, value in self.headers:
                    head += b"" if name == b"upgrade" else b"%s: %s\r\n" % (name, value)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
                self._take(head + b"\r\n" + data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _stop_listening(self) -> None:
        self._deaf, self.cycle.keep_alive = True, False

    def _move(self) -> None:
        # later bytes of the same read are not counted
        self._moved, self._bytes = True, 0

    def _watch(self) -> None:
        """Ends the connection if it waits too long."""
        self._unwatch()
        self._since, self._unsent = self.loop.time(), self.transport.get_write_buffer_size()
        self._late = self.loop.call_later(SECONDS, self._end)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if self._unsent - self.transport.get_write_buffer_size() >= MIN_READ:
            self._watch()
        else:
            self._drop()

    def _drop(self) -> None:
        """Closes the connection; data that the client has not read is lost."""
        if self.transport.get_write_buffer_size():
            peer: socket.socket = self.transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DROP)
        self.transport.abort()


class _ResponseTransport:
    """The transport of a connection, for its responses."""

    def __init__(self, connection: BoundedConnection) -> None:
        self.close = connection.hang_up
        self._transport = connection.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
