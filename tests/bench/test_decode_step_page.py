"""Tests that the floors in docs/results/decode_step.md are those of its records."""

import json
import re
from functools import cache

import pytest

from bench.decode_step import SHAPES, floors, spec_of
from bench.lib import replay
from bench.lib.environment import REPOSITORY
from bench.lib.selection_bytes import selection_bytes

PAGE = (REPOSITORY / "docs/results/decode_step.md").read_text("utf-8")
SECTIONS = {"On an H200": "H200", "K and V of 8 bits": "H200", "Other policies on an H100": "H100"}
# the columns of a table's measured time, and the type of K and V
COLUMNS = {"bf16, ms": "auto", "ms": "auto", "in 8 bits": "int8"}


def rows(section):
    """Yields a table's rows as dictionaries, each with its case and its type of K and V."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    names, _, *cells = [[cell.strip() for cell in line] for line in lines]
    (column,) = COLUMNS.keys() & set(names)
    case = ""
    for row in cells:
        case = row[0] or case
        batch, context = map(int, re.findall(r"\d+", case))
        # of two columns of this name, the first
        found = dict(zip(reversed(names), reversed(row), strict=True))
        found |= {"ms": found[column], "case": f"{batch}x{context * 1024}"}
        yield found | {"kv_cache_dtype": COLUMNS[column]}


@cache
def records():
    """Returns the rows of all decode steps with the shape of Llama 3.1 8B."""
    found = []
    for path in sorted((REPOSITORY / "bench/results").glob("decode_step*/*.json")):
        whole = json.loads(path.read_text("utf-8"))
        for run in whole.get("runs", [whole]):
            named = {"kv_cache_dtype": "auto", "device": run["environment"]["gpus"][0]["name"]}
            if run["settings"].get("shape", "8b") == "8b":
                found += [named | row for row in run["results"] if "over_floor" in row]
    return found


def label(policy):
    """Returns the expression of a measured policy, in a table's quotes."""
    return policy.removeprefix("replayed(").replace("'", '"')


def with_selection(row):
    """Returns a record's median over its floor with selection; "" if selection reads nothing."""
    batch, context = map(int, row["case"].split("x"))
    spec = spec_of(SHAPES["8b"], batch, context, kv_cache_dtype=row["kv_cache_dtype"])
    read = selection_bytes(replay.parse(row["policy"], context), spec)
    found = floors(row | {"selection_bytes": read})
    return f"{found['over_floor_with_selection']:.2f}" if read else ""


@pytest.mark.parametrize("section", SECTIONS)
def test_floor_with_selection_is_that_of_the_measured_step(section):
    for row in rows(section):
        if row.get("weights", "bf16") != "bf16":
            continue
        policy, ms, over = (row[name].split(";")[0] for name in ("policy", "ms", "over its floor"))
        expression = re.escape(policy.split("`")[1]).replace("…", ".*")
        measured = [
            record
            for record in records()
            if SECTIONS[section] in record["device"]
            and all(record[name] == row[name] for name in ("case", "kv_cache_dtype"))
            and re.match(expression, label(record["policy"]))
            and f"{record['seconds']['median'] * 1e3:.2f}" == ms
            and f"{record['over_floor']:.2f}" == over
        ]
        assert measured, row
        assert {with_selection(record) for record in measured} == {row["with selection"]}, row
