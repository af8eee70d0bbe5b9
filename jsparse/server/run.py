"""Runs a server until a signal ends it."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jsparse.engine.async_engine import AsyncEngine
from jsparse.machine.peers import farewells
from jsparse.server import log
from jsparse.server.app import make_app
from jsparse.server.connections import SECONDS, BoundedConnection
from jsparse.server.descriptors import Room, bounds
from jsparse.server.front import Front, Options
from jsparse.server.service import Service

# headers of all responses: browsers must not guess another content type
HEADERS = [("X-Content-Type-Options", "nosniff")]
POLL_SECONDS = 0.05
# seconds that connections may still take once all requests are answered
CLOSE_SECONDS = 5
# seconds in which clients may read that the server has failed, if other processes also have to end
FAREWELL_SECONDS = 2


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; the message of an OSError names host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=bounds(1).backlog)
    except (OSError, OverflowError) as error:
        raise OSError(f"--host {host} --port {port}: {error}") from None


def own_names(address: str, host: str, more: Sequence[str]) -> frozenset[str] | None:
    """Returns the names of a server that only this machine can reach; None: any.

    It listens on `address`, given as `host`; `more` are further names; "*" allows any.
    """
    if "*" in more or not (more or ip_address(address).is_loopback):
        return None
    names = ("localhost", "127.0.0.1", "::1", address, host, *more)
    return frozenset(name.lower() for name in names)


def configured(app: ASGIApp, descriptors: int = 1) -> uvicorn.Config:
    """Returns the configuration of a server, with `descriptors` file descriptors per connection."""
    most, backlog = bounds(descriptors)
    return uvicorn.Config(
        app,
        http=partial(BoundedConnection, room=Room(most)),  # pyright: ignore[reportArgumentType]
        ws="none",
        backlog=backlog,
        headers=HEADERS,
        log_level="warning",
        timeout_keep_alive=2 * SECONDS,  # BoundedConnection closes after SECONDS
        timeout_graceful_shutdown=CLOSE_SECONDS,
        server_header=False,
        lifespan="off",
    )


def serve(
    options: Options,
    make_engine: Callable[[], AsyncEngine],
    listening: socket.socket,
    *,
    on_start: Callable[["Server"], None] = lambda server: None,
    on_ready: Callable[[AsyncEngine], None] = lambda engine: None,
) -> None:
    """Serves requests until SIGTERM or SIGINT; requests in progress may then still finish.

    The server listens, and answers /health, before `make_engine` has loaded the model in a thread.
    `on_start` is called first, and `on_ready` when requests are served.

    Raises:
        ValueError, OSError: `make_engine` raised it; an OSError also stands for a RuntimeError.
    """
    service = Service(options)
    server = Server(make_app(service), service)
    on_start(server)

    def farewell() -> None:
        notify_clients(service)

    async def load() -> None:
        arguments = server, service, make_engine, on_ready, asyncio.get_running_loop()
        threading.Thread(target=_load, args=arguments, daemon=True).start()

    farewells.append(farewell)
    try:
        server.answer(listening, load(), log.log_speed(lambda: service.engine))
        if service.engine is None and server.failed is None:
            os._exit(0)  # nothing can stop the thread that loads the model
    finally:
        service.close()
        farewells.remove(farewell)
    if server.failed is not None:
        raise server.failed


def notify_clients(service: Service) -> None:
    """Ends all requests with an error, and waits at most FAREWELL_SECONDS until it is sent."""
    if service.engine is None:
        return
    service.engine.fail("another process of the model is lost")
    deadline = time.monotonic() + FAREWELL_SECONDS
    while service.inside and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # the event loop writes at the end of its turn


class Server(uvicorn.Server):
    """A server that finishes requests at the first signal, and ends at once at the second.

    `failed` is the error that ended it, or None. `heeds_signals`: whether signals end it.
    """

    heeds_signals = True

    def __init__(self, app: ASGIApp, front: Front, descriptors: int = 1) -> None:
        """Creates a server for the application of `front`; `descriptors` is per connection."""
        super().__init__(configured(app, descriptors))
        self._front = front
        self.failed: BaseException | None = None

    def answer(self, listening: socket.socket, *tasks: Coroutine[Any, Any, None]) -> None:
        """Serves requests, and runs `tasks`, until a signal or a call of `fail`."""
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self._answer(listening, tasks))

    def fail(self, error: BaseException) -> None:
        """Ends the server; any thread may call it."""
        self.failed, self.should_exit = error, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between any two instructions."""
        if self._front.draining:
            self.should_exit = self.force_exit = True
        self._front.draining = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Calls `handle_exit` for signals in the meantime, if they are heeded."""
        with super().capture_signals() if self.heeds_signals else nullcontext():
            yield

    async def _answer(
        self, listening: socket.socket, work: Sequence[Coroutine[Any, Any, None]]
    ) -> None:
        tasks = [asyncio.create_task(work) for work in (self._end_when_drained(), *work)]
        await self.serve([listening])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_when_drained(self) -> None:
        front = self._front
        while not front.draining:
            await asyncio.sleep(POLL_SECONDS)
        seconds = front.options.drain_seconds
        log.logger.info(
            "shutting down: %d requests have up to %g s to finish", front.inside, seconds
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while front.inside:
                    await asyncio.sleep(POLL_SECONDS)
        log.logger.info("shut down: %d requests were cut off", front.inside)
        self.should_exit = True
        self.force_exit = front.inside > 0


def _load(
    server: Server,
    service: Service,
    make_engine: Callable[[], AsyncEngine],
    on_ready: Callable[[AsyncEngine], None],
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Loads the engine, in a thread."""
    try:
        engine = make_engine()
        service.begin(engine)
        loop.call_soon_threadsafe(on_ready, engine)
    except RuntimeError as error:  # XLA's, for instance if it cannot open a file
        log.logger.debug("the engine could not be prepared", exc_info=error)
        server.fail(OSError(f"the engine could not be prepared: {error}"))
    except BaseException as error:
        server.fail(error)
