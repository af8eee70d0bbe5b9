"""Describes a run: command line, machine, versions and revision of the source."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
REVISION_VARIABLES = ("JSPARSE_REVISION", "JSPARSE_GIT_REV")  # the second is the older name


def describe(*, allow_modified: bool = False) -> dict[str, Any]:
    """Returns the environment as a dict ready for JSON; a value that cannot be found is None.

    Scripts call it before they measure, so that the load average is that of other processes and a
    modified working tree fails early.

    Args:
        allow_modified: record a modified working tree instead of refusing it.

    Returns:
        timestamp (of the call, UTC, in ISO 8601), argv (the script, relative to the repository, and
        its arguments), python, platform, cpu, cores (available to this process), load_average (of
        the last minute: timings under load from other processes are unreliable), versions (of those
        installed among jax, jaxlib, numpy, torch and transformers), gpus (name and driver of each,
        from nvidia-smi), git_revision, and modified (whether tracked files differ from that
        revision). JSPARSE_REVISION, if set, overrides the revision, for a copy of the source
        without git; modified is then None.

    Raises:
        SystemExit: the working tree is modified and `allow_modified` is not set.
    """
    revision = _revision()
    if revision["modified"] and not allow_modified:
        raise SystemExit(
            f"error: the working tree differs from revision {str(revision['git_revision'])[:10]}: "
            "commit the changes, or pass --allow-modified to measure them and record that"
        )
    return {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": [_script(sys.argv[0]), *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "load_average": _load_average(),
        "versions": versions(),
        "gpus": _gpus(),
        **revision,
    }


def available_cores() -> int:
    """Returns the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Returns the versions of the installed ones among PACKAGES."""
    found = {}
    for package in PACKAGES:
        # from the installed metadata: importing torch or jax here would affect the measurement
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _gpus() -> list[dict[str, str]]:
    lines = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if lines is None:
        return []
    rows = [line.rsplit(",", 1) for line in lines.splitlines() if "," in line]
    return [{"name": name.strip(), "driver": driver.strip()} for name, driver in rows]


def _script(path: str) -> str:
    """Returns the script's path, relative to the repository if it is inside."""
    resolved = Path(path).resolve()
    inside = resolved.is_relative_to(REPOSITORY)
    return resolved.relative_to(REPOSITORY).as_posix() if inside else path


def _revision() -> dict[str, str | bool | None]:
    for variable in REVISION_VARIABLES:
        if stated := os.environ.get(variable):
            return {"git_revision": stated, "modified": None}
    top = _output("git", "rev-parse", "--show-toplevel")
    revision = _output("git", "rev-parse", "--verify", "HEAD")
    # another repository around an unpacked copy of the source does not have its revision
    if top is None or revision is None or Path(top).resolve() != REPOSITORY:
        return {"git_revision": None, "modified": None}
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {"git_revision": revision, "modified": None if status is None else bool(status)}


def _output(*command: str) -> str | None:
    """Returns the output of a command, or None if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
