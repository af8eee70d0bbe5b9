"""Runs one replica: a server in a separate process, which only the router can reach."""

import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from jsparse.engine.async_engine import AsyncEngine
from jsparse.server import log, run
from jsparse.server.descriptors import bounds
from jsparse.server.engines import describe
from jsparse.server.front import Options

VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# a GPU, and an instance of one, in nvidia-smi's list
LISTED = re.compile(r"^(?P<kind>GPU \d+|\s+MIG \S+).*UUID: (?P<uuid>[^)]+)\)", re.MULTILINE)
# seconds that a process may take to end
END_SECONDS = 10.0
# ignored, since a terminal or service manager also signals the router, which ends its replicas
SIGNALS = {signal.SIGINT, signal.SIGTERM}


class About(NamedTuple):
    """A ready replica's properties: its `describe`, and its maximum context length."""

    description: tuple[str, str]
    max_model_len: int


class ReplicaProcess:
    """The server process of one replica, which listens on the Unix socket `path`."""

    def __init__(
        self,
        options: Options,
        make_engine: Callable[[], AsyncEngine],
        path: Path,
        gpus: str | None,
    ) -> None:
        """Starts the process on these GPUs; None: those that it finds."""
        self.path = path
        path.unlink(missing_ok=True)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # the router has checked clients
        options = replace(options, api_key=None, hosts=None, origins=frozenset())
        arguments = options, make_engine, path, gpus, theirs, log.level()
        self._process = context.Process(target=_main, args=arguments, name=path.stem)
        # the process inherits the blocked signals, and ignores them once it runs
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def told(self) -> About | str | None:
        """Returns, once, its properties when it is ready, or why it ended; else None."""
        try:
            return self._pipe.recv() if self._pipe.poll() else None
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        """Ends the process, by force after END_SECONDS."""
        self._pipe.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.path.unlink(missing_ok=True)


def visible_gpus() -> list[str]:
    """Returns the names for `CUDA_VISIBLE_DEVICES` of this machine's GPUs.

    Raises:
        ValueError: jax would use GPUs, but they cannot be listed.
    """
    if (os.environ.get("JAX_PLATFORMS") or "cuda").split(",")[0] not in ("cuda", "gpu"):
        return []
    named = os.environ.get(VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        ends = [nth for nth, name in enumerate(names) if name in ("", "-1")]
        return names[: min(ends, default=len(names))]
    if not any(map(find_spec, CUDA_PLUGINS)):
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except OSError:
        listed = None
    if listed is None or listed.returncode:
        raise ValueError(f"{VISIBLE}: must name the GPUs, since nvidia-smi cannot list them")
    return _usable(listed.stdout)


def _usable(listed: str) -> list[str]:
    """Returns the GPUs in nvidia-smi's list, or the instances of partitioned ones (MIG)."""
    found = [(each["kind"].startswith("GPU"), each["uuid"]) for each in LISTED.finditer(listed)]
    divided = {
        uuid
        for (whole, uuid), (next_whole, _) in itertools.pairwise(found)
        if whole and not next_whole
    }
    return [uuid for _, uuid in found if uuid not in divided]


def _main(
    options: Options,
    make_engine: Callable[[], AsyncEngine],
    path: Path,
    gpus: str | None,
    pipe: Connection,
    level: str,
) -> None:
    """Runs the replica, in its process."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if gpus is not None:
        os.environ[VISIBLE] = gpus
    log.show(level, path.stem)

    def on_start(server: run.Server) -> None:
        server.heeds_signals = False
        threading.Thread(target=_end_with_router, args=(pipe, server), daemon=True).start()

    def on_ready(engine: AsyncEngine) -> None:
        pipe.send(About(describe(engine), engine.engine.sizes.max_model_len))

    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(bounds(1).backlog)
            run.serve(options, make_engine, listening, on_start=on_start, on_ready=on_ready)
    except (ValueError, OSError) as error:
        pipe.send(str(error))
        sys.exit(2)


def _end_with_router(pipe: Connection, server: run.Server) -> None:
    """Ends the process once the router has closed its end of the pipe, or has ended."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        server.should_exit = server.force_exit = True
        threading.Event().wait(END_SECONDS)
        os._exit(1)  # it hangs
