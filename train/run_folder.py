"""Checks the folder of a training run, and reads and writes its log."""

import json
from pathlib import Path
from typing import Any

import jax


def check_folder(folder: Path, description: dict[str, Any], *, resume: bool) -> None:
    """Raises ValueError unless the folder is free, or with `resume` has a run of these settings."""
    path = folder / "settings.json"
    shown = f"out={str(folder)!r}"
    if path.exists() != resume:
        content = (
            "no training to resume"
            if resume
            else "a training already; resume it or name another folder"
        )
        raise ValueError(f"{shown}: holds {content}")
    if not resume:
        return
    there, here = _leaves(json.loads(path.read_text(encoding="utf-8"))), _leaves(description)
    differing = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
    if differing:
        each = (f"{name} {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise ValueError(f"{shown}: holds a training with other settings: {'; '.join(each)}")


class Log:
    """A writer of JSON lines; drops an interrupted run's lines after step `first`."""

    def __init__(self, path: Path, first: int):
        lines = read_lines(path) if path.exists() and first else []
        aside = path.with_suffix(".new")
        aside.write_text(
            "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= first),
            encoding="utf-8",
        )
        aside.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line and flushes it to disk."""
        self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Returns all lines of a run's log."""
    return read_lines(folder / "log.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a file, without a truncated one."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _leaves(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of nested dicts by path."""
    paths = jax.tree.leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in paths}
