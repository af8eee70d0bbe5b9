"""Runs a server until a signal ends it."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from jsparse.engine.async_engine import AsyncEngine
from jsparse.server import log
from jsparse.server.app import make_app
from jsparse.server.connections import SECONDS, BoundedConnection
from jsparse.server.service import Options, Service

POLL_SECONDS = 0.05
# seconds that connections may still take once all requests are answered
CLOSE_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens.

    Raises:
        OSError: it cannot be had; the message names host and port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise OSError(f"--host {host} --port {port}: {error}") from None


def own_names(address: str, host: str, more: Sequence[str]) -> frozenset[str] | None:
    """Returns the names of a server that this machine alone can reach; None is any.

    Args:
        address: the address that it listens on.
        host: the name by which it was told to.
        more: further names; "*" is any.
    """
    if "*" in more or not (more or ip_address(address).is_loopback):
        return None
    names = ("localhost", "127.0.0.1", "::1", address, host, *more)
    return frozenset(name.lower() for name in names)


def configured(app: ASGIApp) -> uvicorn.Config:
    """Returns how the application is served."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        log_level="warning",
        timeout_keep_alive=2 * SECONDS,  # the connection itself waits SECONDS
        timeout_graceful_shutdown=CLOSE_SECONDS,
        server_header=False,
    )


def serve(
    options: Options,
    make_engine: Callable[[], AsyncEngine],
    listening: socket.socket,
    *,
    on_ready: Callable[[AsyncEngine], None] = lambda engine: None,
) -> None:
    """Answers requests until SIGTERM or SIGINT; those that have begun have time to finish then.

    /health tells meanwhile: the server listens before its model is loaded.

    Args:
        options: the server's options.
        make_engine: loads the model and prepares the engine; runs in a thread.
        listening: the socket, from `listen`.
        on_ready: called when requests are answered.

    Raises:
        ValueError, OSError: `make_engine` raised it.
    """
    service = Service(options)
    config = configured(make_app(service))
    server = _Server(config, service)
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_run(server, service, make_engine, listening, on_ready))
        if service.engine is None and server.failed is None:
            os._exit(0)  # a thread loads the model, and nothing can stop it
    finally:
        service.close()
    if server.failed is not None:
        raise server.failed


class _Server(uvicorn.Server):
    """Finishes requests at the first signal, and ends at once at the second."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.failed: BaseException | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between any two instructions."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True


async def _run(
    server: _Server,
    service: Service,
    make_engine: Callable[[], AsyncEngine],
    listening: socket.socket,
    on_ready: Callable[[AsyncEngine], None],
) -> None:
    loading = threading.Thread(
        target=_load,
        args=(server, service, make_engine, on_ready, asyncio.get_running_loop()),
        daemon=True,
    )
    loading.start()
    beside = [
        asyncio.create_task(work)
        for work in (_end_when_drained(server, service), log.tell_speed(service))
    ]
    await server.serve([listening])
    for task in beside:
        task.cancel()


def _load(
    server: _Server,
    service: Service,
    make_engine: Callable[[], AsyncEngine],
    on_ready: Callable[[AsyncEngine], None],
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Runs in a thread."""
    try:
        engine = make_engine()
        service.begin(engine)
        loop.call_soon_threadsafe(on_ready, engine)
    except BaseException as error:
        server.failed, server.should_exit = error, True


async def _end_when_drained(server: _Server, service: Service) -> None:
    while not service.draining:
        await asyncio.sleep(POLL_SECONDS)
    seconds = service.options.drain_seconds
    log.logger.info("ending: %d requests have up to %g s to finish", service.inside, seconds)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while service.inside:
                await asyncio.sleep(POLL_SECONDS)
    log.logger.info("ended: %d requests were cut off", service.inside)
    server.should_exit = True
    server.force_exit = service.inside > 0
