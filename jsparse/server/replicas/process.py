"""Runs one replica: a server in a process of its own, which the router alone can reach."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from jsparse.engine.async_engine import AsyncEngine
from jsparse.server import log, run
from jsparse.server.engines import describe
from jsparse.server.front import Options

VISIBLE = "CUDA_VISIBLE_DEVICES"


class About(NamedTuple):
    """Says what a replica serves, once it is ready.

    Attributes:
        description: as `describe` has it.
        max_model_len: the most tokens of a prompt and its answer.
    """

    description: tuple[str, str]
    max_model_len: int


class ReplicaProcess:
    """Is the process of one replica.

    Attributes:
        path: the Unix socket at which it listens.
    """

    def __init__(
        self,
        options: Options,
        make_engine: Callable[[], AsyncEngine],
        path: Path,
        gpus: str | None,
    ) -> None:
        """Starts it on these GPUs; None is on what the process finds."""
        self.path = path
        path.unlink(missing_ok=True)
        context = multiprocessing.get_context("spawn")
        self._told, told = context.Pipe(duplex=False)
        # clients have been checked by the router
        options = replace(options, api_key=None, hosts=None)
        arguments = options, make_engine, path, gpus, told, log.level()
        self._process = context.Process(target=_main, args=arguments, name=path.stem)
        self._process.start()
        told.close()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    def told(self) -> About | str | None:
        """Returns, once, what it serves when it is ready, or why it ended; else None."""
        try:
            return self._told.recv() if self._told.poll() else None
        except EOFError:
            return None

    def end(self, seconds: float) -> None:
        """Ends it, by force if it takes longer."""
        self._process.terminate()
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.path.unlink(missing_ok=True)


def visible_gpus() -> list[str]:
    """Returns the names by which `CUDA_VISIBLE_DEVICES` can name the GPUs of this machine."""
    if (os.environ.get("JAX_PLATFORMS") or "cuda").split(",")[0] not in ("cuda", "gpu"):
        return []
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    try:
        found = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except OSError:
        return []
    return [f"{nth}" for nth, _ in enumerate(found.stdout.splitlines())]


def _main(
    options: Options,
    make_engine: Callable[[], AsyncEngine],
    path: Path,
    gpus: str | None,
    told: Connection,
    level: str,
) -> None:
    """Runs in the process."""
    os.setpgrp()  # else it would get the terminal's signals, which the router gets as well
    if gpus is not None:
        os.environ[VISIBLE] = gpus
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log.show(level, path.stem)

    def on_ready(engine: AsyncEngine) -> None:
        told.send(About(describe(engine), engine.engine.sizes.max_model_len))

    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(2048)
            run.serve(options, make_engine, listening, on_ready=on_ready)
    except (ValueError, OSError) as error:
        told.send(str(error))
        sys.exit(2)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
