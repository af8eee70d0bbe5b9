"""Compares rules of hard_kv that count slots by p with uniform budgets, where both read as much."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

BY_SHARE = "n_star", "calibrated", "union"
OPTIONS = re.compile(
    r"\bp=(?P<p>[\d.]+), .*metric='(?P<metric>\w+)', budgets='(?P<rule>\w+)', merge=True"
)
COMPRESSIONS = 4  # of a run: 512 steps, one in 128


class EqualReads(NamedTuple):
    """Holds the KL of a rule that counts by p where it reads as much as uniform budgets do.

    Attributes:
        metric, rule: those of hard_kv.
        length: tokens, prompt and answer together.
        compression: 0 for the steps after the prompt's compression, 1 for those after the next, and
            so on; None for all steps.
        read: the share of what dense attention reads in these steps, of uniform budgets.
        uniform: the KL of uniform budgets.
        p, kl: interpolated between those that read nearest to that, over the logarithm of what they
            read; None where all read more or all less.
    """

    metric: str
    rule: str
    length: int
    compression: int | None
    read: float
    uniform: float
    p: float | None
    kl: float | None


class Measured(NamedTuple):
    """Holds what a policy reads in some steps, its p, and its KL there."""

    read: float
    p: float
    kl: float


def equal_reads(cells: Sequence[Mapping[str, Any]]) -> list[EqualReads]:
    """Compares the rules that count by p with uniform budgets, all merged.

    There is a row for each metric, length, rule and compression, after one for all steps.
    """
    measured: dict[tuple[str, int], dict[str, list[list[Measured]]]] = {}
    for cell in cells:
        options = OPTIONS.search(cell["policy"])
        if cell["task"] == "kl" and options:
            rules = measured.setdefault((options["metric"], cell["length"]), {})
            found = [Measured(read, float(options["p"]), kl) for read, kl in _by_compression(cell)]
            rules.setdefault(options["rule"], []).append(found)
    rows = []
    for (metric, length), rules in measured.items():
        for rule in BY_SHARE:
            for uniform in rules.get("uniform", ()) if rule in rules else ():
                for nth, fixed in enumerate(uniform):
                    p, kl = _at(fixed.read, [found[nth] for found in rules[rule]])
                    compression = nth - 1 if nth else None
                    rows.append(
                        EqualReads(metric, rule, length, compression, fixed.read, fixed.kl, p, kl)
                    )
    return rows


def _by_compression(cell: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns the read share and KL of all steps, then of those after each compression."""
    whole, by_step = cell["metrics"], cell.get("by_step", {})
    means = [(whole["read"]["mean"], whole["kl"]["mean"])]
    if len(by_step.get("kl", ())) % COMPRESSIONS == 0 and by_step:
        parts = (np.reshape(by_step[name], (COMPRESSIONS, -1)).mean(-1) for name in ("read", "kl"))
        means += [(float(read), float(kl)) for read, kl in zip(*parts, strict=True)]
    return means


def _at(read: float, found: Sequence[Measured]) -> tuple[float | None, float | None]:
    """Returns p and KL where a rule reads so much."""
    reads, *others = zip(*sorted(found), strict=True)
    if not reads[0] <= read <= reads[-1]:
        return None, None
    p, kl = (float(np.interp(np.log(read), np.log(reads), y)) for y in others)
    return p, kl


def show_equal_reads(rows: Sequence[EqualReads]) -> None:
    """Prints them, to four digits."""
    table = Table(*("uniform's KL" if name == "uniform" else name for name in EqualReads._fields))
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row))
    Console().print(table)
