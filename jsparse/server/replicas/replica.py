"""Keeps one replica running, and asks it."""

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
# how often a replica is asked whether its engine works
HEALTH_SECONDS = 1.0
# the seconds before one is started again, at first and at most
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
# how long it may take to answer that, and how often in a row it may take longer, without requests
SILENT_SECONDS, MAX_SILENT = 10.0, 3
# how long a process may take to its first answer: it imports jax before it listens
START_SECONDS = 120.0
# in an answer, or in the first event of one, that could not be begun
FAILED = b'"code":"engine_error"'
log = logging.getLogger("jsparse.server")


class NeverReady(ValueError):
    """Signals that a replica ended at its first start, and says why."""


class Replica:
    """One replica, as the router sees it: what it serves once ready, and whether it is."""

    def __init__(self, nth: int, start: Callable[[], ReplicaProcess]) -> None:
        self.nth, self.about, self.ready = nth, None, False
        self._start = start
        self._process: ReplicaProcess | None = None
        self._path: Path | None = None
        self._answers = WeakSet[ReplicaResponse]()

    async def watch(self, forget: Callable[[], None]) -> None:
        """Keeps the process running; `forget` is called before it begins anew.

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
            log.error("%s; it is started again", reason)
            forget()
            await asyncio.to_thread(self.end)
            if time.monotonic() - began > MAX_PAUSE_SECONDS:
                pause = PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _run(self) -> str:
        """Starts the process, and returns why it has to be started again, once that is so."""
        process = await asyncio.to_thread(self._begin)
        self._path = process.path
        try:
            return await self._until_lost(process)
        finally:
            self.ready, self._path = False, None
            for answer in list(self._answers):
                answer.close()

    def _begin(self) -> ReplicaProcess:
        self._process = self._start()  # here, not where it is waited for: that may be cancelled
        return self._process

    async def _until_lost(self, process: ReplicaProcess) -> str:
        """Waits until a process has ended or does not answer any more; returns why."""
        began = asked = time.monotonic()
        running, heard, silent = False, False, 0
        while True:
            alive = process.alive  # first: its last message may arrive after its end
            told = process.told()
            if isinstance(told, About):
                self.about, self.ready, running, heard = told, True, True, True
            elif told is not None or not alive:
                if self.about is None:
                    raise NeverReady(told or f"replica {self.nth} has ended")
                return f"replica {self.nth}{f': {told}' if told else ' has ended'}"
            if time.monotonic() - asked > HEALTH_SECONDS:
                try:
                    reason = await self._unhealthy()
                except (TimeoutError, Lost):
                    silent, self.ready = silent + 1, False
                    slow = time.monotonic() - began > START_SECONDS
                    if silent >= MAX_SILENT and (heard or slow):
                        return f"replica {self.nth} does not answer"
                except ApiError as error:  # no word about the replica
                    if self.ready:
                        log.warning("replica %d cannot be asked: %r", self.nth, error.__cause__)
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
        """Sends a request; returns the answer, which has begun to come and is to be closed.

        Raises:
            Lost: it has not begun to answer, and will not. Pieces raise it as well.
            ApiError: this process cannot connect.
        """
        answer = await self._sent(method, path, body)
        try:
            first = await answer.begun()
            if answer.status == 503 or FAILED in first:
                raise Lost("its engine has failed, or it is ending")
        except BaseException:
            answer.close()
            raise
        return answer

    async def pictures(self) -> AsyncGenerator[dict[str, Any]]:
        """Yields what it shows of itself, as long as it runs."""
        with suppress(Lost, ApiError), closing(await self.ask("GET", "/live")) as answer:
            rest = b""
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    *events, rest = (rest + piece).split(b"\n\n")
                    for each in events:
                        yield orjson.loads(each.removeprefix(b"data: "))

    async def _unhealthy(self) -> str | None:
        """Returns its message if its engine has failed."""
        async with asyncio.timeout(SILENT_SECONDS):
            with closing(await self._sent("GET", "/health")) as answer:
                text = b"".join([piece async for piece in answer.pieces()])
                return None if answer.status == 200 else text.decode()

    async def _sent(self, method: str, path: str, body: bytes | None = None) -> ReplicaResponse:
        """Sends a request; returns its answer, which is to be closed."""
        if self._path is None:
            raise Lost("it is not running")
        here = self._path
        answer = await ReplicaResponse.to(here, method, path, body)
        if self._path is not here:  # it was lost meanwhile, and its answers were closed
            answer.close()
            raise Lost("it is not running")
        self._answers.add(answer)
        return answer
