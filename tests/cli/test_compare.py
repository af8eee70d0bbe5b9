"""Tests `jsparse compare` on a tiny random model: its files, and refusals in one line."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jsparse.cli.app import app
from jsparse.cli.compare import split
from jsparse.evaluation.comparison.result import ComparedPolicy, PolicyComparison

TINY = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf"


def run(*args):
    return CliRunner().invoke(app, ["compare", *map(str, args)])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the cat sat on the mat and the dog ran to the red house " * 20)
    return file


def row(form, policy, wanted, share):
    means = {"held": 1.0, "read": share, "attended": share, "agreement": 0.5, "perplexity": 9.0}
    at = {"bytes_share": share, "bytes_read": 100}
    return ComparedPolicy(policy, form, wanted, **at, kl=0.25, kl_interval=None, **means)


def test_writes_the_result_and_the_plot(text, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    asked = {}

    def measured(params, text, policies, *, on_progress, **options):
        asked.update(options, policies=policies, text=text[:7])
        on_progress("prefill", 1, 2)
        policy = "streaming(sink=1, recent=31)"
        rows = row("dense()", "dense()", None, 1.0), row("streaming(sink=1)", policy, 0.5, 0.52)
        return PolicyComparison(params.name, params.types, 64, 1, 4, rows)

    monkeypatch.setattr("jsparse.evaluation.comparison.compare.compare", measured)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    given = ("--policies", "streaming(sink=1),dense", "--bytes", "0.5,300", "--json", out)
    sizes = ("--length", "64", "--steps", "4", "--samples", "1")
    done = run(TINY, text, *given, *sizes, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert asked == {
        "policies": ["streaming(sink=1)", "dense"],
        "text": "the cat",
        "bytes": [0.5, 300],
        "length": 64,
        "samples": 1,
        "steps": 4,
        "batch": 4,
        "page_size": 16,
    }
    assert done.stdout.split("recent=31)")[1].split()[:4] == ["52.0", "100.0", "52.0", "0.25"]
    assert done.stderr.splitlines() == [f"wrote {out}", f"wrote {plot}"]
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(each["form"], each["wanted"]) for each in rows] == [
        ("dense()", None),
        ("streaming(sink=1)", 0.5),
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_measures_a_text(text):
    sizes = ("--length", "64", "--steps", "4", "--samples", "1")
    done = run(TINY, text, "--policies", "streaming(sink=1)", "--bytes", "0.5", *sizes)
    assert done.exit_code == 0, done.output
    assert "streaming(sink=1, recent=" in done.stdout


def test_refuses_in_one_line(text, tmp_path, monkeypatch):
    for args, said in (
        ((text, "--bytes", "a"), "bytes='a': must be numbers with commas between them"),
        ((text, "--bytes", "2e9"), "bytes=2000000000.0: must be above 0 and at most 1"),
        ((text, "--policies", "qest"), "unknown policy 'qest'"),
        ((text, "--policies", "quest,"), "policy=''"),
        ((text, "--length", "64"), "steps=64: must be at most length - 2 = 62"),
        ((text, "--json", tmp_path / "no" / "out.json"), "out.json': must be in an existing"),
        ((text, "--plot", tmp_path), "must be a file, not a folder"),
        ((text, "--plot", "out.xyz"), "--plot 'out.xyz': must be a .png or .svg or .pdf file"),
        ((tmp_path / "none.txt",), "cannot be read"),
    ):
        refused = run(TINY, *args)
        assert (refused.exit_code, refused.stdout) == (2, ""), said
        assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1, said
        assert said in refused.stderr
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "--plot needs matplotlib" in run(TINY, text, "--plot", "out.png").stderr


def test_policies_are_split_at_commas_outside_of_brackets():
    given = "quest, twilight(quest(budget=8), p=0.9),lychee_decode(((1, 0), (0, 1))),own.py:mine"
    assert split(given) == [
        "quest",
        "twilight(quest(budget=8), p=0.9)",
        "lychee_decode(((1, 0), (0, 1)))",
        "own.py:mine",
    ]
