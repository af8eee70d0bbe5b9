"""Tests that a killed run resumes where it stopped, without lost or duplicate entries.

It never overwrites another run.
"""

import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jsparse.evaluation.store import Cell, ResultStore
from tests.support.made_up_report import DENSE, entry

pytestmark = pytest.mark.pure

SETTINGS = {
    "model": "made-up",
    "policies": [DENSE],
    "tasks": ["a", "b"],
    "lengths": [64],
    "samples": 3,
    "seed": 0,
}
CELLS = [Cell(DENSE, task, 64) for task in SETTINGS["tasks"]]


def measure(cell, index):
    """Returns the same values at every call, as the samples of a run do.

    Its text has several bytes per letter.
    """
    return entry(
        *cell, index=index, meta={"text": "né\n→", "depth": index / 3}, score=index / 7, attended=1
    )


def go_on(store):
    for cell in CELLS:
        if missing := store.missing(cell):
            store.add([measure(cell, index) for index in missing])


def taken(store):
    return Counter((e["task"], e["index"]) for e in store.entries)


WHOLE = Counter((cell.task, index) for cell in CELLS for index in range(3))


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk():
    """The tests simulate kills by truncating files, hundreds of times."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.fsync", lambda file: None)
        yield


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.json"


with TemporaryDirectory() as folder:
    undisturbed = ResultStore(f"{folder}/out.json", SETTINGS)
    go_on(undisturbed)
    DATA = undisturbed.journal.read_bytes()
HEADER = DATA.index(b"\n") + 1


@given(st.integers(HEADER, len(DATA)))
@example(HEADER)
@example(HEADER + 1)
@example(len(DATA) - 1)
@example(len(DATA))
def test_run_killed_anywhere_resumes(cut):
    with TemporaryDirectory() as folder:
        path = Path(folder, "out.json")
        path.with_suffix(".partial.jsonl").write_bytes(DATA[:cut])
        kept = DATA[:cut].count(b"\n") - 1
        resumed = ResultStore(path, SETTINGS, resume=True)
        assert [e["index"] for e in resumed.entries] == [0, 1, 2, 0, 1, 2][:kept]
        assert resumed.journal.read_bytes() == DATA[: DATA[:cut].rindex(b"\n") + 1]
        go_on(resumed)
        assert taken(resumed) == WHOLE
        assert resumed.journal.read_bytes() == DATA, "the journal of an undisturbed run"


def test_journal_without_complete_settings_is_refused(path):
    broken = [b"[]\n", b"{}\n", b"3\n", b"null\n", b'{"settings": 3}\n', b"\xff\n"]
    for header in [*broken, b"", DATA[:9], DATA[: HEADER - 1]]:
        path.with_suffix(".partial.jsonl").write_bytes(header)
        with pytest.raises(ValueError, match="does not begin with a run's settings"):
            ResultStore(path, SETTINGS, resume=True)


def test_broken_line_inside_a_journal_is_named(path):
    whole = DATA[: DATA.index(b"\n", HEADER) + 1]
    entry = measure(CELLS[0], 1)
    unfit = [json.dumps(entry | {"values": each}).encode() for each in (3, {"a": "x"}, {"a": None})]
    for line in (b"{}", b"[]", b"3", b"", b"{", b"\0" * 40, b'{"score": NaN}', *unfit):
        path.with_suffix(".partial.jsonl").write_bytes(whole + line + b"\n")
        with pytest.raises(ValueError, match=r"out\.partial\.jsonl, line 3: "):
            ResultStore(path, SETTINGS, resume=True)


def test_missing_lists_the_samples_left(path):
    store = ResultStore(path, SETTINGS)
    store.add([measure(CELLS[0], 1), measure(CELLS[1], 4)])
    assert store.missing(CELLS[0]) == [0, 2]
    assert store.missing(CELLS[1]) == [0, 1, 2]
    assert store.missing(CELLS[1], samples=6) == [0, 1, 2, 3, 5]
    assert store.missing(CELLS[0]._replace(length=65)) == [0, 1, 2]


def test_other_settings_are_refused_by_name_and_values(path):
    ResultStore(path, SETTINGS)
    with pytest.raises(ValueError, match="other settings: samples is 3 there and 5 now$"):
        ResultStore(path, SETTINGS | {"samples": 5}, resume=True)
    with pytest.raises(
        ValueError,
        match=r"dtype is None there and 'float32' now; lengths is \[64\] there and \[65\]",
    ):
        ResultStore(path, SETTINGS | {"dtype": "float32", "lengths": (65,)}, resume=True)


def test_unfinished_run_is_not_restarted_by_default(path):
    go_on(ResultStore(path, SETTINGS))
    with pytest.raises(ValueError, match="holds an unfinished run: must be resumed"):
        ResultStore(path, SETTINGS)
    assert taken(ResultStore(path, SETTINGS, resume=True)) == WHOLE


def test_finished_run_is_not_overwritten(path):
    ResultStore(path, SETTINGS).finish({})
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"out\.json already exists"):
            ResultStore(path, SETTINGS, resume=resume)


def test_duplicate_entries_count_once(path):
    store = ResultStore(path, SETTINGS)
    go_on(store)
    lines = store.journal.read_bytes()
    store.add([measure(CELLS[0], 0), measure(CELLS[0], 0)])
    assert store.journal.read_bytes() == lines
    with open(store.journal, "ab") as file:
        file.write(lines.split(b"\n")[2] + b"\n")
    assert taken(ResultStore(path, SETTINGS, resume=True)) == WHOLE


def test_duplicate_entries_must_agree(path):
    store = ResultStore(path, SETTINGS)
    first, other = entry(*CELLS[0], 0, score=1), entry(*CELLS[0], 0, score=0)
    fresh = measure(CELLS[0], 1)
    for batch in ([first, other], [fresh, first, other]):
        with pytest.raises(ValueError, match=r"sample 0 of .*'a', 64\) .*must be measured once"):
            store.add(batch)
    assert store.entries == [] and store.journal.read_bytes() == DATA[:HEADER], (
        "nothing of a refused batch is kept"
    )
    store.add([first])
    with pytest.raises(ValueError, match="'score': 1.0.*'score': 0.0"):
        store.add([other])
    with open(store.journal, "a") as file:
        file.write(json.dumps(other) + "\n")
    with pytest.raises(ValueError, match="must be measured once"):
        ResultStore(path, SETTINGS, resume=True)


def test_values_that_are_not_finite_are_refused(path):
    store = ResultStore(path, SETTINGS)
    for value in [float("nan"), float("inf"), -float("inf"), np.float32("nan")]:
        with pytest.raises(ValueError, match=r"kl=.* in sample 2 of a: must be finite"):
            store.add([entry(*CELLS[0], 2, score=1, kl=value)])
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.add([entry(*CELLS[0], 2, {"depth": float(value)}, score=1)])
        assert store.entries == [], value


def test_finish_leaves_one_complete_file(path):
    store = ResultStore(path, SETTINGS)
    go_on(store)
    report = store.finish({"python": "3"})
    assert [file.name for file in path.parent.iterdir()] == ["out.json"]
    assert json.loads(path.read_text()) == report
    assert report.keys() == {"timestamp", "environment", "settings", "cells", "averages"}
    assert report["environment"] == {"python": "3"} and report["settings"] == SETTINGS
    assert [(cell["policy"], cell["task"], cell["length"]) for cell in report["cells"]] == CELLS
    for cell, key in zip(report["cells"], CELLS, strict=True):
        there = [
            {name: measure(key, i)[name] for name in ("index", "values", "meta")} for i in range(3)
        ]
        assert cell["samples"] == there
        assert cell["metrics"]["score"]["mean"] == pytest.approx(1 / 7)


def test_kill_during_finish_leaves_the_journal_or_the_whole_result(path, monkeypatch):
    store = ResultStore(path, SETTINGS)
    go_on(store)
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.finish({})
    assert not path.exists()
    resumed = ResultStore(path, SETTINGS, resume=True)
    assert taken(resumed) == WHOLE
    journal = resumed.journal.read_bytes()
    resumed.finish({})
    resumed.journal.write_bytes(journal)  # as if killed before the journal was removed
    again = ResultStore(path, SETTINGS, resume=True)
    assert [again.missing(cell) for cell in CELLS] == [[], []]
    again.finish({})
    assert [file.name for file in path.parent.iterdir()] == ["out.json"]
