"""Tests that the pages of the papers agree with the records that they cite.

docs/papers/claims.toml gives the source of each measured figure in a page's table of claims.
"""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "docs" / "papers"
RESULTS = ROOT / "bench" / "results"
CLAIMS = tomllib.loads((PAPERS / "claims.toml").read_text("utf-8"))
# the settings that older records do not name
UNNAMED = {"weights": "bf16", "shape": "8b", "ranks": 1}
UNITS = "%|times|µs|ms|GB|tokens/s"
MEASURED = re.compile(rf"(?<![\w.-])(?:\d[\d,]*(?:\.\d+)?(?= (?:{UNITS}))|\d+\.\d+(?!\w))")


@cache
def record(name: str) -> Any:
    return json.loads((RESULTS / name).read_text("utf-8"))


def fits(row: Any, wanted: Mapping[str, Any]) -> bool:
    """Returns whether a row has these values; * in a string matches any characters."""
    return all(
        fnmatchcase(row.get(name, ""), value) if isinstance(value, str) else row.get(name) == value
        for name, value in wanted.items()
    )


def found(name: str, path: list[Any]) -> float:
    """Follows a path of keys, indices, and tables that must match one row of a list."""
    at = record(name)
    for step in path:
        if isinstance(step, dict):
            (at,) = (row for row in at if fits(row, step))
        else:
            at = at[step]
    return float(at)


def value(claim: Mapping[str, Any]) -> float:
    number = found(claim["record"], claim["of"])
    if "less" in claim:
        number -= found(claim["record"], claim["less"])
    number *= claim.get("scale", 1)
    if "over" in claim:
        number /= found(claim.get("over_record", claim["record"]), claim["over"])
    return number


def here(page: Path) -> list[str]:
    """Returns the last cells of the table of claims, without code and links' addresses."""
    _, _, rest = page.read_text("utf-8").partition("\n## The paper's claims, and ours\n")
    rows = re.findall(r"^\|(.+)\|$", rest.partition("\n## ")[0], re.MULTILINE)
    cells = [row.rpartition("|")[2] for row in rows]
    return [re.sub(r"`[^`]*`|\]\([^)]*\)", " ", cell) for cell in cells[2:]]


@cache
def commit_dates() -> Mapping[str, float]:
    """Returns the time of each commit in seconds; {} without git's history."""
    if not shutil.which("git"):
        return {}
    command = ["git", "log", "--all", "--format=%H %ct"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = map(str.split, log.stdout.splitlines())
    return {commit: float(seconds) for commit, seconds in lines}


@cache
def made(revision: str) -> float:
    """Returns the time in seconds of a revision, which may be abbreviated; 0 if it is unknown."""
    return next((at for full, at in commit_dates().items() if full.startswith(revision)), 0.0)


def date(run: Mapping[str, Any]) -> float:
    """Returns the start time of a run in seconds; for older records, the time of its revision."""
    if stamp := run["environment"].get("timestamp", run.get("timestamp")):
        return datetime.fromisoformat(stamp).timestamp()
    revision = run["environment"].get("git_revision")
    return made(revision) if revision else 0.0


def runs(name: str) -> Iterator[Mapping[str, Any]]:
    """Yields the runs of a record that list their rows as results; each names its benchmark."""
    whole = record(name)
    for run in whole.get("runs", [whole]) if isinstance(whole, dict) else []:
        if isinstance(run, dict) and {"benchmark", "environment", "results"} <= run.keys():
            yield run


@cache
def timed_runs() -> Mapping[str, list[tuple[str, Mapping[str, Any]]]]:
    """Returns all runs by benchmark, with the names of their records."""
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for path in sorted(RESULTS.rglob("*.json")):
        name = path.relative_to(RESULTS).as_posix()
        for run in runs(name):
            found.setdefault(run["benchmark"], []).append((name, run))
    return found


def named(run: Mapping[str, Any], row: Mapping[str, Any], setting: str) -> Any:
    """Returns a setting of a row, from the row, from its run, or None."""
    return row.get(setting, run.get("settings", {}).get(setting, UNNAMED[setting]))


def later(name: str, path: list[Any]) -> set[str]:
    """Returns the records of later runs of a claim's row: same benchmark, device and settings."""
    if path[0] != "results" or not isinstance(path[1], dict):
        return set()
    measured = path[2]

    def same(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
        alike = all(named(run, own, x) == named(other, row, x) for x in UNNAMED)
        return alike and fits(row, path[1]) and measured in row

    found = set()
    for run in runs(name):
        (own,) = (row for row in run["results"] if fits(row, path[1]))
        found |= {
            other
            for other, its in timed_runs()[run["benchmark"]]
            if device(its) == device(run) and 0 < date(run) < date(its)
            if any(same(its, row) for row in its["results"])
        }
    return found


def device(run: Mapping[str, Any]) -> str | None:
    """Returns the model of a run's GPU, or of its CPU if there is no GPU."""
    gpus = run["environment"].get("gpus")
    return gpus[0]["name"] if gpus else run["environment"].get("cpu")


@pytest.mark.parametrize("page", sorted(CLAIMS))
def test_timed_figure_is_of_the_newest_run_or_gives_a_reason(page):
    for claim in CLAIMS[page]:
        record_of = {"of": claim["record"], "less": claim["record"]}
        record_of["over"] = claim.get("over_record", claim["record"])
        paths = [(name, claim[key]) for key, name in record_of.items() if key in claim]
        newer = set().union(*(later(*at) for at in paths))
        # the reverse check would fail without the full git history
        assert not newer or "older" in claim, (claim["figure"], newer)


@pytest.mark.parametrize("page", sorted(CLAIMS))
def test_figures_of_a_table_equal_those_of_their_records(page):
    cells = here(PAPERS / f"{page}.md")
    assert cells
    told = {figure for cell in cells for figure in MEASURED.findall(cell)}
    assert told == {claim["figure"] for claim in CLAIMS[page]}
    for claim in CLAIMS[page]:
        decimals = len(claim["figure"].partition(".")[2])
        said = float(claim["figure"].replace(",", ""))
        assert abs(value(claim) - said) <= 0.5001 * 10**-decimals, claim
