"""Keeps one replica running, and sends it requests."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import orjson

from jsparse.server.errors import ApiError
from jsparse.server.replicas.process import About, ReplicaProcess
from jsparse.server.replicas.response import Lost, ReplicaResponse

POLL_SECONDS = 0.1
# seconds between two health checks of a replica
HEALTH_SECONDS = 1.0
# seconds before a restart, at first and at most
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
# the timeout of a health check, which stops requests to the replica; MAX_SILENT timeouts in a row
# restart it
SILENT_SECONDS, MAX_SILENT = 10.0, 3
# seconds until a process must first respond: it imports jax before it listens
START_SECONDS = 120.0
# in a response, or in its first event, if the request could not be started
FAILED = b'"code":"engine_error"'
log = logging.getLogger("jsparse.server")


class NeverReady(ValueError):
    """A replica ended at its first start, for the reason in the message."""


class Replica:
    """One replica, as the router sees it: its properties once ready, and whether it is ready."""

    def __init__(self, nth: int, start: Callable[[], ReplicaProcess]) -> None:
        self.nth, self.about, self.ready = nth, None, False
        self._start = start
        self._process: ReplicaProcess | None = None
        self._path: Path | None = None
        self._responses = WeakSet[ReplicaResponse]()

    async def watch(self, forget: Callable[[], None]) -> None:
        """Keeps the process running; `forget` is called before each restart.

        Raises:
            NeverReady: it ended before it was ready for the first time.
        """
        pause = PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                reason = await self._run()
            except Exception as error:
                if self.about is None:
                    raise
                reason = f"replica {self.nth} could not be started: {error}"
            log.error("%s; restarting it", reason)
            forget()
            await asyncio.to_thread(self.end)
            if time.monotonic() - began > MAX_PAUSE_SECONDS:
                pause = PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _run(self) -> str:
        """Starts the process; once it must be restarted, returns why."""
        process = await asyncio.to_thread(self._begin)
        self._path = process.path
        try:
            return await self._until_lost(process)
        finally:
            self.ready, self._path = False, None
            for response in list(self._responses):
                response.close()

    def _begin(self) -> ReplicaProcess:
        self._process = self._start()  # set in this thread, since the caller may be cancelled
        return self._process

    async def _until_lost(self, process: ReplicaProcess) -> str:
        """Waits until a process has ended or no longer responds; returns why."""
        began = asked = time.monotonic()
        running, heard, silent = False, False, 0
        while True:
            alive = process.alive  # read first: the last message may arrive after the end
            news = process.told()
            if isinstance(news, About):
                self.about, self.ready, running, heard = news, True, True, True
            elif news is not None or not alive:
                if self.about is None:
                    raise NeverReady(news or f"replica {self.nth} has ended")
                return f"replica {self.nth}{f': {news}' if news else ' has ended'}"
            if time.monotonic() - asked > HEALTH_SECONDS:
                try:
                    reason = await self._unhealthy()
                except (TimeoutError, Lost):
                    silent, self.ready = silent + 1, False
                    slow = time.monotonic() - began > START_SECONDS
                    if silent >= MAX_SILENT and (heard or slow):
                        return f"replica {self.nth} does not respond"
                except ApiError as error:  # not the replica's fault
                    if self.ready:
                        log.warning("replica %d cannot be reached: %r", self.nth, error.__cause__)
                else:
                    heard, silent, self.ready = True, 0, running and reason is None
                    if running and reason is not None:
                        return f"replica {self.nth} has failed: {reason}"
                asked = time.monotonic()
            await asyncio.sleep(POLL_SECONDS)

    def end(self) -> None:
        if self._process is not None:
            self._process.end()

    async def ask(self, method: str, path: str, body: bytes | None = None) -> ReplicaResponse:
        """Sends a request; returns its response once it has started, for the caller to close.

        Raises:
            Lost: there will be no response. Reading its pieces may also raise it.
            ApiError: this process cannot connect.
        """
        response = await self._sent(method, path, body)
        try:
            first = await response.begun()
            if response.status == 503 or FAILED in first:
                raise Lost("its engine has failed, or it is shutting down")
        except BaseException:
            response.close()
            raise
        return response

    async def pictures(self) -> AsyncGenerator[dict[str, Any]]:
        """Yields its /live data, as long as it runs."""
        with suppress(Lost, ApiError), closing(await self.ask("GET", "/live")) as response:
            rest = b""
            async with aclosing(response.pieces()) as pieces:
                async for piece in pieces:
                    *events, rest = (rest + piece).split(b"\n\n")
                    for each in events:
                        yield orjson.loads(each.removeprefix(b"data: "))

    async def _unhealthy(self) -> str | None:
        """Returns its message if its engine has failed, else None."""
        async with asyncio.timeout(SILENT_SECONDS):
            with closing(await self._sent("GET", "/health")) as response:
                text = b"".join([piece async for piece in response.pieces()])
                return None if response.status == 200 else text.decode()

    async def _sent(self, method: str, path: str, body: bytes | None = None) -> ReplicaResponse:
        """Sends a request; returns its response, for the caller to close."""
        if self._path is None:
            raise Lost("it is not running")
        here = self._path
        response = await ReplicaResponse.to(here, method, path, body)
        if self._path is not here:  # it was lost in the meantime, and its responses were closed
            response.close()
            raise Lost("it is not running")
        self._responses.add(response)
        return response
