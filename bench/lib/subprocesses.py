"""Runs each contender in its own process, so that they do not share memory or programs."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from bench.lib.environment import REPOSITORY


def run_child(
    module: str, arguments: list[str], *, python: str = sys.executable, timeout_s: int = 1800
) -> Any:
    """Runs `python -m module …` and returns the JSON in the last line of its output.

    Raises:
        RuntimeError: the process failed; the message has the end of its error output.
    """
    command = [python, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def stream_child(
    module: str, arguments: list[str], *, python: str = sys.executable
) -> Iterator[Any]:
    """Runs `python -m module …` and yields every line of JSON objects as it is printed.

    Raises:
        RuntimeError: the process failed; the message has the end of its error output.
    """
    command = [python, "-m", module, *arguments]
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if child.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Writes the report so far, so that an interrupted run leaves its rows.

    Without a path it writes nothing.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median, the minimum and the maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
