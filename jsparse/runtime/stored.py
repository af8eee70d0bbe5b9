"""Stores compiled programs on disk, so that the next process neither traces nor compiles them.

jax's own cache is keyed by a program's text. To get the text, a process must trace and lower the
program, which takes most of a server's start. Here the key is made from everything that determines
the text: the versions and options of all packages involved, the device, jsparse's source files, the
function and its static arguments, and the shapes of the others.
"""

import inspect
import logging
import os
import pickle
import platform
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from jsparse.machine.folders import distrust
from jsparse.runtime import fingerprint

logger = logging.getLogger("jsparse.programs")

# The maximum size of all files; the least recently used are deleted.
MAX_BYTES = 4 * 2**30
# modules that load a library which their programs call
RUNTIMES = ("jax.experimental.mosaic.gpu", "jax_triton")
PACKAGES = ("jax", "jaxlib", "numpy", "flax", "triton", "jax-triton")
# settings that are per process, or that do not affect programs
UNRELATED = (
    "cache",
    "_log_",
    "logging",
    "traceback",
    "tracer",
    "mock",
    "timeout",
    "transfer_guard",
)


class Stored(NamedTuple):
    """A program, and its serialized form."""

    program: Callable[..., Any]
    data: bytes


class ProgramStore:
    """Programs stored in a folder."""

    def __init__(self, folder: Path) -> None:
        """Sets up a store; the folder is created with the first stored program."""
        self.folder, self._warned = folder, False

    def key(self, function: Callable[..., Any], static: Any, shapes: Any) -> str | None:
        """Returns the name under which a program is stored, or None if it cannot be stored.

        Args:
            function: the function that is compiled.
            static: its static arguments and its compile options.
            shapes: the structure and the shapes of its other arguments.
        """
        try:
            return fingerprint.of(environment(), inspect.unwrap(function), static, str(shapes))
        except fingerprint.NoFingerprint as unknown:
            logger.debug("%s is not stored: %s has no fingerprint", function, unknown)
            return None

    def get(self, key: str, arguments: Any, devices: Sequence[Any]) -> Stored | None:
        """Returns the program stored under a name, unpacked, or None if there is none."""
        if self._distrusted():
            return None
        file = self.folder / key
        try:
            data = file.read_bytes()
            made = unpacked(data, arguments, devices)
        except FileNotFoundError:
            return None
        except Exception as error:
            logger.warning("%s cannot be read and is compiled again: %r", file, error)
            return None
        with suppress(OSError):
            os.utime(file)
        return Stored(made, data)

    def put(self, key: str, made: Any) -> None:
        """Stores a program, which may already be packed."""
        try:
            data = getattr(made, "data", None) or packed(made)
        except Exception as error:
            # for example a program that calls back to the host
            logger.debug("a program is not stored: %r", error)
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._distrusted():
                return
            with NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(data)
            Path(file.name).replace(self.folder / key)
            self._make_room()
        except OSError as error:
            logger.warning("a program cannot be stored in %s: %s", self.folder, error)

    def _distrusted(self) -> bool:
        """Returns whether the folder is distrusted; the first time, a warning gives the reason."""
        reason = distrust(self.folder)
        if reason is not None and not self._warned:
            self._warned = True
            logger.warning("programs in %s are not used: %s", self.folder, reason)
        return reason is not None

    def _make_room(self) -> None:
        files = []
        for entry in os.scandir(self.folder):
            # another process or thread may have deleted it
            with suppress(FileNotFoundError):
                files.append((entry.stat(), entry.path))
        files.sort(key=lambda file: file[0].st_mtime, reverse=True)
        total = 0
        for stat, path in files:
            total += stat.st_size
            if total > MAX_BYTES:
                with suppress(OSError):
                    os.unlink(path)


def packed(made: Any) -> bytes:
    """Serializes a compiled program for `unpacked`, in this process or another.

    Raises:
        Exception: it cannot be serialized, for example because it calls back to the host.
    """
    program, _, results = serialize_executable.serialize(made)
    stored = {
        "program": program,
        "runtimes": [name for name in RUNTIMES if name in sys.modules],
        # a structure has no text of its own, but one filled with numbers does
        "results": jax.tree.unflatten(results, range(results.num_leaves)),
    }
    return zlib.compress(pickle.dumps(stored), 1)


def unpacked(data: bytes, arguments: Any, devices: Sequence[Any]) -> Callable[..., Any]:
    """Returns a program for these devices.

    Args:
        data: the result of `packed`.
        arguments: arguments of the program's structure.
        devices: the devices that it was compiled for, in their order.

    Raises:
        Exception: the program cannot be read.
    """
    stored = pickle.loads(zlib.decompress(data))
    for name in stored["runtimes"]:
        import_module(name)
    return serialize_executable.deserialize_and_load(
        stored["program"],
        jax.tree.structure(arguments),
        jax.tree.structure(stored["results"]),
        execution_devices=devices,
    )


def environment() -> tuple[Any, ...]:
    """Returns everything that a program depends on besides its own code."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
    }
    return *_machine(), repr(settings()), repr(variables)


def settings() -> tuple[Any, ...]:
    """Returns jax's settings as this thread sees them."""
    return tuple(getattr(jax.config, name) for name in _setting_names())


@cache
def _setting_names() -> list[str]:
    names = [name for name in sorted(jax.config.values) if hasattr(jax.config, name)]
    return [name for name in names if not any(word in name for word in UNRELATED)]


@cache
def _machine() -> tuple[str, ...]:
    device = jax.local_devices()[0]
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    here = (sys.version, platform.machine(), device.platform, device.device_kind)
    features = ""
    if device.platform == "cpu":
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            features = next((line for line in lines if line.startswith("flags")), "")
    return *versions, *here, str(device.client.platform_version), features


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
