"""Tests bench.offloaded: a line for each contender, and what a failure looks like."""

import json

import pytest

from bench.offloaded import asked, line, main


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["offloaded", *arguments, "--tiny", "--allow-modified"])
    main()


@pytest.mark.slow
def test_a_tiny_run_has_a_line_for_each_step(monkeypatch, capsys, tmp_path):
    names = ["lfps, gathered", "copy K and V", "copy K, exact top-k", "dense, device"]
    names += ["quest, a quarter", "twilight"]
    path = tmp_path / "report.json"
    run(monkeypatch, "steps", "--context", "4096", "--only", *names, "--json", str(path))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [text[:28].strip() for text in lines] == names
    rows = json.loads(path.read_text())["results"][1:]
    assert all(row["seconds"]["median"] > 0 for row in rows)
    assert [row["policy"] for row in rows] == [asked(name, 4096) for name in names]
    lfps, *_, quest, twilight = (row.get("read_fraction") for row in rows)
    assert lfps == pytest.approx(0.02, abs=2e-3)
    assert quest == pytest.approx(0.25, abs=2e-3)
    assert 0 < twilight < quest


@pytest.mark.slow
def test_prompts_are_read_in_processes_of_their_own(monkeypatch, capsys):
    run(monkeypatch, "prompt", "--new", "4", "--prompts", "600 offloaded(quest())", "600 nothing()")
    read, failed = capsys.readouterr().out.splitlines()
    assert read.split()[:3] == ["600", "offloaded(quest())", "read"]
    assert "600 nothing()" in failed
    assert "failed" in failed


def test_what_was_not_begun_is_a_line():
    assert line({"name": "quest", "error": "not begun"}).split() == [
        "quest",
        "failed:",
        "not",
        "begun",
    ]
    assert "OTHERS" in line({"policy": "quest()", "same": False, "host": [1, 2]})
