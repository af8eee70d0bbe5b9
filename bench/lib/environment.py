"""What a benchmark's numbers depend on besides its own settings: machine, versions and revision of the source."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")


def describe() -> dict:
    """Returns the environment as a dict ready for JSON; what cannot be found out is None.

    Keys: python, platform, cpu, cores (those this process may use), load_average (of the last minute: timings taken
    while others use the machine are worth little), versions (of the installed ones among jax, jaxlib, numpy, torch and
    transformers), gpus (name and driver of each, from nvidia-smi), git_revision and git_modified (whether tracked
    files differ from that revision). Where git or its repository is missing, the revision is taken from the
    environment variable JSPARSE_GIT_REV and git_modified is None.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "load_average": _load_average(),
        "versions": _versions(),
        "gpus": _gpus(),
        **_revision(),
    }


def available_cores() -> int:
    """Returns the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        # Read from the installed metadata: importing torch or jax here would weigh on what is measured.
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


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


def _revision() -> dict[str, str | bool | None]:
    top = _output("git", "rev-parse", "--show-toplevel")
    if stated := os.environ.get("JSPARSE_GIT_REV"):
        return {"git_revision": stated, "git_modified": None}
    revision = _output("git", "rev-parse", "--verify", "HEAD")
    # Another repository around an unpacked copy of the source says nothing about the source.
    if top is None or revision is None or Path(top).resolve() != REPOSITORY:
        return {"git_revision": None, "git_modified": None}
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {"git_revision": revision, "git_modified": None if status is None else bool(status)}


def _output(*command: str) -> str | None:
    """Returns what the command prints, or None where it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
