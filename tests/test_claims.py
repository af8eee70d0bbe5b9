"""Tests that the pages of the papers say what the records say that they cite.

docs/papers/claims.toml says where each measured figure in a page's table of claims comes from.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "docs" / "papers"
CLAIMS = tomllib.loads((PAPERS / "claims.toml").read_text("utf-8"))
UNITS = "%|times|µs|ms|GB|tokens/s"
MEASURED = re.compile(rf"(?<![\w.-])(?:\d[\d,]*(?:\.\d+)?(?= (?:{UNITS}))|\d+\.\d+(?!\w))")


@cache
def record(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / name).read_text("utf-8"))


def fits(row: Any, wanted: Mapping[str, Any]) -> bool:
    """Says whether a row has these values; * in a string stands for any characters."""
    return all(
        fnmatchcase(row.get(name, ""), value) if isinstance(value, str) else row.get(name) == value
        for name, value in wanted.items()
    )


def found(name: str, path: list[Any]) -> float:
    """Follows a path of keys, indices, and tables that must fit one row of a list."""
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


@pytest.mark.parametrize(
    ("page", "claim"),
    [(page, claim) for page, claims in CLAIMS.items() for claim in claims],
    ids=lambda x: x if isinstance(x, str) else x["figure"],
)
def test_a_figure_is_that_of_its_record(page, claim):
    assert any(claim["figure"] in MEASURED.findall(cell) for cell in here(PAPERS / f"{page}.md"))
    decimals = len(claim["figure"].partition(".")[2])
    said = float(claim["figure"].replace(",", ""))
    assert abs(value(claim) - said) <= 0.5001 * 10**-decimals


@pytest.mark.parametrize("page", sorted(CLAIMS))
def test_every_measured_figure_of_a_table_has_a_record(page):
    cells = here(PAPERS / f"{page}.md")
    assert cells
    known = {claim["figure"] for claim in CLAIMS[page]}
    assert {figure for cell in cells for figure in MEASURED.findall(cell)} <= known
