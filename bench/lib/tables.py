"""Reads tables.toml: the committed results, and the commands that produce them."""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lib.environment import REPOSITORY

PATH = REPOSITORY / "bench/tables.toml"
RESULTS = Path("bench/results")
BUILD = Path("build/bench")


@dataclass(frozen=True)
class Table:
    """One committed result; paths are relative to the repository.

    Attributes:
        name: the folder of its files in bench/results.
        shows: its content, in one sentence.
        machine: h200 or h100 (NVIDIA H200, H100) or cpu (two cores of an AMD EPYC).
        files: its files; a script writes the first, and the plots with it.
        page: the page that shows it.
        script: the module that produces it; "" if none does today.
        revision: the last one with the script that produced it, if its question is answered.
        arguments: the arguments of every run.
        runs: further arguments of each run, if there are several.
        output: the option for the report's path; "" if the script only prints.
        note: facts that the record lacks, or how it was made by hand.
    """

    name: str
    shows: str
    machine: str
    files: Sequence[str]
    page: str
    script: str = ""
    revision: str = ""
    arguments: Sequence[str] = ()
    runs: Sequence[Sequence[str]] = ((),)
    output: str = "--json"
    note: str = ""

    @property
    def results(self) -> list[Path]:
        """The committed files."""
        return [RESULTS / self.name / file for file in self.files]

    @property
    def build(self) -> Path:
        """The default path of a new report, outside the committed ones."""
        return BUILD / self.name / Path(self.files[0]).name

    def commands(self, out: Path, more: Sequence[str] = ()) -> list[list[str]]:
        """Returns the commands that produce the result.

        Args:
            out: the path of the report; several runs append _1, _2, … to its stem.
            more: arguments that follow those of the table.

        Raises:
            ValueError: no command produces the result.
        """
        if self.revision:
            raise ValueError(
                f"name={self.name!r}: check out revision {self.revision}, the last with its script"
            )
        if not self.script:
            raise ValueError(f"name={self.name!r}: no command produces it. {self.note}")
        commands = []
        for nth, run in enumerate(self.runs, 1):
            path = out if len(self.runs) == 1 else out.with_stem(f"{out.stem}_{nth}")
            # an option that takes a folder gets the path without its suffix
            target = path if self.output != "--out" else path.with_suffix("")
            written = [self.output, str(target)] if self.output else []
            commands.append(_python(self.script, *self.arguments, *run, *more, *written))
        return commands


def tables(path: Path = PATH) -> Mapping[str, Table]:
    """Returns the tables by name, in the order of the file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Table(name, **entry) for name, entry in entries.items()}


def find(name: str) -> Table:
    """Returns one table.

    Raises:
        ValueError: there is no table of that name.
    """
    known = tables()
    if name not in known:
        raise ValueError(f"name={name!r}: must be one of {', '.join(known)}")
    return known[name]


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
