"""Contenders in processes of their own, so that neither memory nor compiled programs of one burden the other."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.lib.environment import REPOSITORY


def run_child(module: str, arguments: list[str], *, python: str = sys.executable, timeout_s: int = 1800) -> Any:
    """Runs `python -m module …` and returns what the last line of its output says in JSON.

    Raises:
        RuntimeError: it failed; the end of its error output is in the message.
    """
    command = [python, "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Writes what there is so far, so that a run that is cut short leaves its rows; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
