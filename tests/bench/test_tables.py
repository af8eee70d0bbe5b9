"""Tests tables.toml and `python -m bench`: every result has an entry, every entry a script."""

import ast
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import __main__ as command
from bench.lib.environment import REPOSITORY
from bench.lib.tables import RESULTS, tables

pytestmark = pytest.mark.pure

TABLES = tables()
SCRIPTS = {path.stem for path in (REPOSITORY / "bench").glob("[a-z]*.py")}


def test_an_entry_names_what_exists():
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


def test_every_result_is_named_by_an_entry():
    named = {path for table in TABLES.values() for path in table.results}
    root = REPOSITORY / RESULTS
    committed = {path.relative_to(REPOSITORY) for path in root.rglob("*") if path.is_file()}
    assert committed == named


def options(script):
    """Returns the options that a script of bench adds to its parser, and the shared ones."""
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


def test_scripts_know_the_options_of_their_entries():
    for table in OF_BENCH:
        known = options(table.script.removeprefix("bench."))
        if table.script == "bench.kernels":
            known |= {"--grid", "--hybrid"}  # added in a loop
        for words in table.commands(Path("out.json")):
            if words[2] == table.script:
                given = {word for word in words[3:] if word.startswith("--")}
                assert given <= known, table.name


def test_results_of_one_run_lie_where_reproduce_says():
    one, several = TABLES["prefill"], TABLES["decode_step_lychee"]
    assert str(one.build) == "build/bench/prefill/h200.json"
    (words,) = one.commands(one.build)
    assert words == [sys.executable, "-m", "bench.prefill", "--json", str(one.build)]
    written = [Path(words[-1]).name for words in several.commands(several.build)]
    assert written == ["h200_1.json", "h200_2.json"]
    assert all(words[-2] == "--json" for words in several.commands(several.build))


def test_further_arguments_come_last_and_folders_have_no_suffix():
    (run,) = TABLES["kernels"].commands(Path("a/b.json"), ["--allow-modified"])
    assert run[2:] == ["bench.kernels", "--grid", "--allow-modified", "--json", "a/b.json"]
    folders = [words[-2:] for words in TABLES["gates_smollm2"].commands(Path("a/b.json"))]
    assert folders == [["--out", f"a/b_{nth}"] for nth in range(1, 9)]
    assert "--json" not in TABLES["gpu_tests"].commands(Path("a.txt"))[0]


@pytest.fixture
def bench():
    """Returns a function that runs `python -m bench` with these arguments."""
    return lambda *arguments: CliRunner().invoke(command.app, arguments)


def test_a_table_that_cannot_be_reproduced_is_one_line(bench):
    for name, said in [
        ("no_such", "must be one of quality, "),
        ("products", "no command makes it"),
        ("page_ranking", "check out revision e930a3a"),
    ]:
        failed = bench("reproduce", name)
        assert failed.exit_code == 1, name
        assert failed.stderr.count("\n") == 1 and said in failed.stderr and name in failed.stderr, (
            name
        )


def test_reproduce_runs_the_script_away_from_the_committed_results(bench, monkeypatch, tmp_path):
    ran = []

    def run(words, *, cwd, check):
        ran.append(words[1:])
        return subprocess.CompletedProcess(words, 3 if "--fail" in words else 0)

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.setattr(command, "REPOSITORY", tmp_path)
    done = bench("reproduce", "prefill", "--", "--runs", "5")
    assert done.exit_code == 0
    out = "build/bench/prefill/h200.json"
    assert ran == [["-m", "bench.prefill", "--runs", "5", "--json", out]]
    assert (tmp_path / out).parent.is_dir()
    assert shlex.join(ran[0]) in done.stderr
    bench("reproduce", "prefill", "--out", str(tmp_path / "bench/results/prefill/h200.json"))
    assert ran[-1][-1] == "bench/results/prefill/h200.json"
    failed = bench("reproduce", "decode_step_lychee", "--", "--fail")
    assert failed.exit_code == 3 and len(ran) == 3


def test_readme_has_every_script_and_table():
    readme = (REPOSITORY / "bench/README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `python -m bench.")]
    listed = {row.split("`")[1].removeprefix("python -m bench."): row for row in rows}
    assert set(listed) == SCRIPTS
    for name, table in TABLES.items():
        if table.script.startswith("bench."):
            assert f"`{name}`" in listed[table.script.removeprefix("bench.")]
