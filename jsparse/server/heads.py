"""Bounds the heads of HTTP requests, which come before any key is known."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_BYTES, MOST_SECONDS = 2**16, 60


class BoundedHeads(HttpToolsProtocol):
    """Closes connections whose request line and headers are too large, or take too long."""

    _in_head, _moved, _bytes = True, False, 0
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
        """Takes in bytes, and counts those of a head that has not ended."""
        self._moved = False
        super().data_received(data)
        # bytes that end a head or a body are not told apart from those behind it
        if not self._in_head or self._moved or self.transport.is_closing():
            return
        self._bytes += len(data)
        if self._bytes > MOST_BYTES:
            self.send_400_response(f"The head is too large: must have at most {MOST_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Begins the request."""
        self._in_time()
        self._in_head, self._bytes, self._moved = False, 0, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends the request; another may follow."""
        self._in_head = self._moved = True
        super().on_message_complete()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
