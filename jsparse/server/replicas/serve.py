"""Runs a router and its replicas until a signal ends them."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fastapi import FastAPI

from jsparse.engine.async_engine import AsyncEngine
from jsparse.server.app import gated
from jsparse.server.front import Options
from jsparse.server.replicas.folder import socket_folder
from jsparse.server.replicas.process import ReplicaProcess, visible_gpus
from jsparse.server.replicas.replica import POLL_SECONDS, Replica
from jsparse.server.replicas.router import Router, routes
from jsparse.server.run import Server


def make_app(router: Router) -> FastAPI:
    """Returns the application of a router."""
    app = gated(router, routes, openapi_url=None)
    app.state.router = router
    return app


def serve(
    options: Options,
    make_engines: Sequence[Callable[[], AsyncEngine]],
    gpus_each: int,
    listening: socket.socket,
    *,
    on_ready: Callable[[tuple[str, str]], None],
) -> None:
    """Serves requests by several engines, as `run.serve` does by one.

    `make_engines` are pickled for the processes; each process sees `gpus_each` GPUs. `on_ready` is
    called when all are ready, with their description.

    Raises:
        ValueError: there are too few GPUs, or an engine could not be prepared.
    """
    count, gpus = len(make_engines), visible_gpus()
    if gpus and count * gpus_each > len(gpus):
        each = f" with {gpus_each} GPUs each" if gpus_each > 1 else ""
        raise ValueError(
            f"data_parallel_size={count}{each}: must be at most {len(gpus) // gpus_each}, since "
            f"{len(gpus)} GPUs are visible"
        )
    shares = [
        ",".join(gpus[nth * gpus_each :][:gpus_each]) if gpus else None for nth in range(count)
    ]
    with socket_folder() as folder:
        replicas = [
            Replica(
                nth,
                partial(
                    *(ReplicaProcess, options, make_engine),
                    path=folder / f"replica {nth}",
                    gpus=shares[nth],
                ),
            )
            for nth, make_engine in enumerate(make_engines)
        ]
        router = Router(options, replicas)
        server = Server(make_app(router), router, descriptors=2)  # for the client and the replica

        async def watch(replica: Replica) -> None:
            try:
                await router.watch(replica)
            except Exception as error:
                server.fail(error)

        async def report_ready() -> None:
            while any(replica.about is None for replica in replicas):
                await asyncio.sleep(POLL_SECONDS)
            about = replicas[0].about
            assert about is not None
            on_ready(about.description)

        try:
            server.answer(listening, report_ready(), *map(watch, replicas))
        finally:
            with ThreadPoolExecutor(len(replicas)) as threads:
                list(threads.map(Replica.end, replicas))
    if server.failed is not None:
        raise server.failed
