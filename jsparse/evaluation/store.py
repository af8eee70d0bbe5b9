"""Records a run in a journal that survives a kill, and in a JSON file at the end.

During the run, OUT.partial.jsonl is next to OUT.json: one line with the settings, then one line per
entry. A run that restarts with the same settings reads it and measures the missing samples.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from jsparse.evaluation.statistics import averages, summarize


class Cell(NamedTuple):
    """The key of samples that are summarised together."""

    policy: str
    task: str
    length: int


class Entry(TypedDict):
    """One sample of a cell: finite `values` by metric, and further facts in `meta`.

    The heat maps read depth (of the needle, 0 … 1) and attended_heads ([layers][KV heads], null if
    nothing was selected) from `meta`.
    """

    policy: str
    task: str
    length: int
    index: int
    values: dict[str, float]
    meta: dict[str, Any]


Key = tuple[Cell, int]


class ResultStore:
    """The entries of a run: a kill loses none for which `add` returned, and none are repeated.

    One process at a time may write a run. `settings` are all JSON values that the entries depend
    on, including `samples` per cell. The journal is next to `path`, with the suffix .partial.jsonl.

    Raises:
        ValueError: `path` already exists; its journal does, and `resume` is False or the settings
            differ; or the journal was not written by a `ResultStore`.
    """

    def __init__(
        self, path: Path | str, settings: Mapping[str, Any], *, resume: bool = False
    ) -> None:
        self.path = Path(path)
        self.journal = self.path.with_suffix(".partial.jsonl")
        self.settings: dict[str, Any] = json.loads(_line(settings))
        self._entries: dict[Key, Entry] = {}
        if self.journal.exists():
            self._read(resume)
        elif self.path.exists():
            raise ValueError(f"{self.path} already exists: must be a new file, or one to resume")
        else:
            _replace(self.journal, _line({"settings": self.settings}))

    @property
    def entries(self) -> list[Entry]:
        """The entries so far, in order of arrival."""
        return list(self._entries.values())

    def missing(self, cell: Cell, samples: int | None = None) -> list[int]:
        """Returns the indices below `samples`, by default the settings', without an entry."""
        indices = range(self.settings["samples"] if samples is None else samples)
        return [index for index in indices if (cell, index) not in self._entries]

    def add(self, entries: Iterable[Entry]) -> None:
        """Writes a batch of entries that are not stored yet; when it returns, they are on disk.

        Raises:
            ValueError: an entry is malformed, or differs from the stored one of the same sample;
                nothing of the batch is written then.
        """
        new = self._new(map(_checked, entries))
        with open(self.journal, "ab") as file:
            file.write("".join(map(_line, new.values())).encode())
            file.flush()
            os.fsync(file.fileno())
        self._entries |= new

    def finish(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the JSON file atomically, removes the journal and returns the report."""
        cells = summarize(self.entries)
        report = {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": dict(environment),
            "settings": self.settings,
            "cells": cells,
            "averages": averages(cells),
        }
        _replace(self.path, _line(report))
        self.journal.unlink()
        return report

    def _read(self, resume: bool) -> None:
        """Loads the entries of complete lines and cuts off a truncated last line."""
        data = self.journal.read_bytes()
        end = data.rfind(b"\n") + 1
        header, *lines = data[:end].split(b"\n")
        self._compare(header)
        if not resume:
            raise ValueError(
                f"{self.journal} holds an unfinished run: must be resumed (--resume), or removed "
                "to start again"
            )
        self._entries = self._new(
            self._parsed(number, line) for number, line in enumerate(lines[:-1], 2)
        )
        os.truncate(self.journal, end)

    def _compare(self, header: bytes) -> None:
        try:
            there = dict(json.loads(header)["settings"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.journal} does not begin with a run's settings, so nothing in it can be "
                "used: must be removed"
            ) from None
        differing = [
            f"{name} is {there.get(name)!r} there and {self.settings.get(name)!r} now"
            for name in sorted(there.keys() | self.settings.keys())
            if there.get(name) != self.settings.get(name)
        ]
        if differing:
            raise ValueError(
                f"{self.journal} is of a run with other settings: {'; '.join(differing)}"
            )

    def _parsed(self, number: int, line: bytes) -> Entry:
        try:
            return _checked(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.journal}, line {number}: {error}") from None

    def _new(self, entries: Iterable[Entry]) -> dict[Key, Entry]:
        """Returns the entries that are not stored yet, without duplicates."""
        new: dict[Key, Entry] = {}
        for entry in entries:
            key = Cell(entry["policy"], entry["task"], entry["length"]), entry["index"]
            known = self._entries.get(key) or new.setdefault(key, entry)
            if known["values"] != entry["values"]:
                raise ValueError(
                    f"sample {key[1]} of {tuple(key[0])} has the values {known['values']} and "
                    f"{entry['values']}: must be measured once"
                )
        return new


def _checked(entry: Entry) -> Entry:
    """Checks an entry and returns a copy as JSON would return it."""
    if entry.keys() != Entry.__annotations__.keys():
        raise ValueError(
            f"an entry has the keys {', '.join(entry)}: must be {', '.join(Entry.__annotations__)}"
        )
    for metric, value in entry["values"].items():
        if not math.isfinite(value):
            raise ValueError(
                f"{metric}={value!r} in sample {entry['index']} of {entry['task']}: must be finite"
            )
    values = {metric: float(value) for metric, value in entry["values"].items()}
    return json.loads(_line({**entry, "values": values}))


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Writes the text to the file atomically, replacing any old one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
