"""Compares rules of hard_kv that count slots by p with uniform budgets, where both read as much."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

BY_SHARE = "n_star", "calibrated"
OPTIONS = re.compile(
    r"\bp=(?P<p>[\d.]+), .*metric='(?P<metric>\w+)', budgets='(?P<rule>\w+)', merge=True"
)


class EqualReads(NamedTuple):
    """Holds what a rule that counts by p costs where it reads as much as uniform budgets do.

    Attributes:
        metric, rule: those of hard_kv.
        length: tokens, prompt and answer together.
        read: the share of what dense attention reads, of uniform budgets.
        uniform: the KL of uniform budgets.
        p, kl: interpolated between those that read nearest to that, over the logarithm of what they
            read; None where all read more or all less.
    """

    metric: str
    rule: str
    length: int
    read: float
    uniform: float
    p: float | None
    kl: float | None


def equal_reads(cells: Sequence[Mapping[str, Any]]) -> list[EqualReads]:
    """Compares the rules that count by p with uniform budgets, all merged, by metric and length."""
    measured: dict[tuple[str, int], dict[str, list[tuple[float, float, float]]]] = {}
    for cell in cells:
        options = OPTIONS.search(cell["policy"])
        if cell["task"] == "kl" and options:
            read, kl = (cell["metrics"][name]["mean"] for name in ("read", "kl"))
            rules = measured.setdefault((options["metric"], cell["length"]), {})
            rules.setdefault(options["rule"], []).append((read, float(options["p"]), kl))
    rows = []
    for (metric, length), rules in measured.items():
        for rule in BY_SHARE:
            for read, _, uniform in rules.get("uniform", ()) if rule in rules else ():
                reads, *others = zip(*sorted(rules[rule]), strict=True)
                p = kl = None
                if reads[0] <= read <= reads[-1]:
                    p, kl = (float(np.interp(np.log(read), np.log(reads), y)) for y in others)
                rows.append(EqualReads(metric, rule, length, read, uniform, p, kl))
    return rows


def show_equal_reads(rows: Sequence[EqualReads]) -> None:
    """Prints them, to four digits."""
    table = Table(*("uniform's KL" if name == "uniform" else name for name in EqualReads._fields))
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row))
    Console().print(table)
