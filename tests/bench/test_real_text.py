"""Tests bench.real_text: which lines are asked for, and that tasks read what it writes."""

import json
import sys

import pytest

from bench import real_text
from bench.real_text import next_lines, repeating
from jsparse.evaluation import tasks

FILLER = "x = [1, 2, 3]  # no long names here\n" * 100  # 3600 characters


def test_lines_repeat_a_name_from_far_before():
    text = f"def remembered_names():\n{FILLER}    return remembered_names + 1\n"
    (line,) = repeating(text, 3624)
    assert line.text == "    return remembered_names + 1"
    assert text[line.start :].startswith(line.text)
    # neither where it stands just before, nor where it stands nowhere, nor where it is too far
    near = f"def remembered_names():\n{FILLER}remembered_names()\n    return remembered_names + 1\n"
    assert [found.text for found in repeating(near, 3624)] == []
    assert not list(repeating(text.replace("def remembered_names", "def another_name"), 3624))
    assert not list(repeating(text, 3623))


def test_rows_are_whole_and_their_answers_follow(monkeypatch):
    body = f"def remembered_names():\n{FILLER}    return remembered_names + 1\n"
    texts = {"a.py": body, "b.py": body + body.replace("remembered", "other_one")}
    monkeypatch.setattr(real_text, "modules", lambda: list(texts.items()))
    rows = next_lines(1394, 10)
    assert sorted(row["_id"] for row in rows) == ["a.py:102", "b.py:102", "b.py:204"]
    for row in rows:
        name, _, number = row["_id"].partition(":")
        before = texts[name].splitlines(keepends=True)[: int(number) - 1]
        assert "".join(before).endswith(row["context"])
        assert row["answers"] == [texts[name].splitlines()[int(number) - 1]]
        assert row["context"].startswith(
            "def remembered_names" if number == "102" else "def other_one_name"
        )
    assert len(next_lines(1394, 2)) == 2


def test_tasks_read_what_is_written(monkeypatch, tmp_path, capsys):
    pytest.importorskip("wonderwords", reason="needs the extra eval")
    body = f"def remembered_names():\n{FILLER}    return remembered_names + 1\n"
    monkeypatch.setattr(real_text, "modules", lambda: [("a.py", body)])
    monkeypatch.setattr(real_text, "licences", lambda: ["You may use it. " * 500])
    monkeypatch.setattr(sys, "argv", ["real_text", "--out", str(tmp_path), "--lengths", "1394"])
    real_text.main()
    assert "1394/lcc.jsonl" in capsys.readouterr().out
    assert json.loads((tmp_path / "sources.json").read_text())["modules"] == 1
    (code,) = tasks.parse("longbench_lcc", tmp_path / "1394")
    sample = code.sample(lambda text: text.split(), 4000, 0)
    assert not sample.meta["cut"]
    assert code.score("    return remembered_names + 1\n", sample) == 1
    (needle,) = tasks.parse("niah_single_2", tmp_path / "1394")
    assert "You may use it." in needle.sample(lambda text: text.split(), 600, 0).prompt
