"""Tests tables.toml: every result has an entry, every entry a script."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.lib.environment import REPOSITORY
from bench.lib.tables import RESULTS, tables

pytestmark = pytest.mark.pure

TABLES = tables()
SCRIPTS = {path.stem for path in (REPOSITORY / "bench").glob("[a-z]*.py")}


def test_entry_names_existing_files():
    for name, table in TABLES.items():
        assert all((REPOSITORY / path).is_file() for path in table.results), name
        assert table.machine in ("h200", "h100", "cpu"), name
        assert table.shows.endswith(".") and ". " not in table.shows, name
        assert table.page.endswith(".md"), name
        if table.script:
            assert find_spec(table.script) is not None, name
        else:
            assert table.revision or table.note, name
        assert not (table.script and table.revision), name


def test_every_result_has_an_entry():
    named = {path for table in TABLES.values() for path in table.results}
    root = REPOSITORY / RESULTS
    committed = {path.relative_to(REPOSITORY) for path in root.rglob("*") if path.is_file()}
    assert committed == named


def options(script):
    """Returns the options that a benchmark script adds to its parser, and the shared ones."""
    tree = ast.parse((REPOSITORY / "bench" / f"{script}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    added = {
        argument.value
        for call in calls
        if ast.unparse(call.func).endswith("add_argument")
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }
    shared = {"report_parser": {"--json", "--allow-modified"}, "recording_parser": set()}
    return added.union(*(shared.get(name, set()) for name in names))


OF_BENCH = [table for table in TABLES.values() if table.script.startswith("bench.")]


def test_scripts_have_the_options_of_their_entries():
    for table in OF_BENCH:
        known = options(table.script.removeprefix("bench."))
        if table.script == "bench.kernels":
            known |= {"--grid", "--hybrid"}  # added in a loop
        for words in table.commands(Path("out.json")):
            if words[2] == table.script:
                given = {word for word in words[3:] if word.startswith("--")}
                assert given <= known, table.name


def test_readme_lists_every_script_and_table():
    readme = (REPOSITORY / "bench/README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `python -m bench.")]
    listed = {row.split("`")[1].removeprefix("python -m bench."): row for row in rows}
    assert set(listed) == SCRIPTS
    for name, table in TABLES.items():
        if table.script.startswith("bench."):
            assert f"`{name}`" in listed[table.script.removeprefix("bench.")]
