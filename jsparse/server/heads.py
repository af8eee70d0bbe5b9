"""Bounds the heads and trailers of HTTP requests, which need no key."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_BYTES, MOST_SECONDS = 2**16, 60


class BoundedHeads(HttpToolsProtocol):
    """Closes connections whose headers are too large, or whose first head takes too long."""

    _moved, _bytes = False, 0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the first head; uvicorn itself waits for those that follow."""
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._late = asyncio.get_running_loop().call_later(MOST_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes in bytes, and counts those that neither end a head nor belong to a body."""
        self._moved = False
        super().data_received(data)
        if self._moved or self.transport.is_closing():
            return
        self._bytes += len(data)
        if self._bytes > MOST_BYTES:
            self.send_400_response(f"The head is too large: must have at most {MOST_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Begins the request."""
        self._in_time()
        self._move()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes in a piece of the body, which is bounded where it is read."""
        self._move()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request; another may follow."""
        self._move()
        super().on_message_complete()

    def _move(self) -> None:
        # what follows in the same piece is not counted
        self._moved, self._bytes = True, 0

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
