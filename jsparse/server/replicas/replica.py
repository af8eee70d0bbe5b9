"""Keeps one replica running, and asks it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import httpx
import orjson

from jsparse.engine.errors import EngineError
from jsparse.server.replicas.process import About, ReplicaProcess

POLL_SECONDS = 0.1
# how often a replica is asked whether its engine works
HEALTH_SECONDS = 1.0
# the most seconds between two starts of one that ends again and again
MAX_PAUSE_SECONDS = 60.0
END_SECONDS = 10.0
# in an answer, or in the first event of one, that could not be begun
FAILED = b'"code":"engine_error"'
log = logging.getLogger("jsparse.server")


class Lost(EngineError):
    """Signals that a replica has ended, or that its engine has failed."""


class NeverReady(ValueError):
    """Signals that a replica ended at its first start, and says why."""


class Replica:
    """Is one replica, as the router sees it.

    Attributes:
        nth: its number.
        about: what it serves; None as long as it has not been ready.
        ready: whether it takes requests.
    """

    def __init__(self, nth: int, start: Callable[[], ReplicaProcess]) -> None:
        """Prepares a replica, whose process `start` starts, and starts again when it has ended."""
        self.nth, self.about, self.ready = nth, None, False
        self._start = start
        self._process: ReplicaProcess | None = None
        self._client: httpx.AsyncClient | None = None

    async def watch(self, forget: Callable[[], None]) -> None:
        """Keeps the process running; `forget` is told that it has begun anew.

        Raises:
            NeverReady: it ended before it was ready for the first time.
        """
        pause = 1.0
        while True:
            began = time.monotonic()
            process = await asyncio.to_thread(self._begin)
            transport = httpx.AsyncHTTPTransport(
                uds=str(process.path), limits=httpx.Limits(max_connections=None)
            )
            self._client = httpx.AsyncClient(
                transport=transport, base_url="http://replica", timeout=None
            )
            try:
                reason = await self._until_lost(process)
            finally:
                self.ready = False
                await self._client.aclose()
            if self.about is None:
                raise NeverReady(reason)
            log.error("%s; it is started again", reason)
            forget()
            await asyncio.to_thread(process.end, END_SECONDS)
            if time.monotonic() - began > MAX_PAUSE_SECONDS:
                pause = 1.0
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _begin(self) -> ReplicaProcess:
        self._process = self._start()  # here, not where it is waited for: that may be cancelled
        return self._process

    async def _until_lost(self, process: ReplicaProcess) -> str:
        """Waits until a process has ended or does not answer any more; returns why."""
        asked = time.monotonic()
        while True:
            told = process.told()
            if isinstance(told, About):
                self.about, self.ready = told, True
            elif told is not None:
                return f"replica {self.nth}: {told}" if self.about else told
            elif not process.alive:
                return f"replica {self.nth} has ended"
            if self.ready and time.monotonic() - asked > HEALTH_SECONDS:
                asked = time.monotonic()
                if (reason := await self._reason()) is not None:
                    return reason
            await asyncio.sleep(POLL_SECONDS)

    async def _reason(self) -> str | None:
        """Returns why it should be started again, or None."""
        assert self._client is not None
        try:
            answer = await self._client.get("/health", timeout=END_SECONDS)
        except httpx.HTTPError:
            return None  # its process has ended, or is busy
        return (
            None if answer.status_code == 200 else f"replica {self.nth}: {answer.json()['status']}"
        )

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.end(END_SECONDS)

    async def ask(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[httpx.Response, AsyncGenerator[bytes]]:
        """Sends a request; returns the answer's head and pieces, of which the first has come.

        Raises:
            Lost: it has not begun to answer, and will not. Pieces raise it as well.
        """
        assert self._client is not None
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = self._client.build_request(method, path, content=body, headers=headers)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed
            raise Lost(f"{error!r}") from None
        pieces = self._pieces(response)
        try:
            first = await anext(pieces, b"")
            if response.status_code == 503 or FAILED in first:
                raise Lost("its engine has failed, or it is ending")
        except BaseException:
            await pieces.aclose()
            raise
        return response, _with_first(first, pieces)

    async def pictures(self) -> AsyncGenerator[dict[str, Any]]:
        """Yields what it shows of itself, as long as it runs."""
        with suppress(Lost):
            _, pieces = await self.ask("GET", "/live")
            rest = b""
            async with aclosing(pieces):
                async for piece in pieces:
                    *events, rest = (rest + piece).split(b"\n\n")
                    for each in events:
                        yield orjson.loads(each.removeprefix(b"data: "))

    async def _pieces(self, response: httpx.Response) -> AsyncGenerator[bytes]:
        try:
            async for piece in response.aiter_raw():
                yield piece
        except httpx.HTTPError:
            raise Lost("the connection was lost") from None
        finally:
            await response.aclose()


async def _with_first(first: bytes, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(pieces):
        yield first
        async for piece in pieces:
            yield piece
