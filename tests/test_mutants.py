"""Tests that every fault of mutants.toml can be put in, and how faults are judged and put in."""

import os
from dataclasses import replace

import pytest

from tests.mutants import (
    LIST,
    Mutant,
    Run,
    Verdict,
    check,
    first_failure,
    judged,
    load,
    put_in,
    shares,
)

FAULT = Mutant("a fault", "source.py", "x < y", "x <= y", ("test_source.py",))
RUN = Run(1, "test_source.py::test_less", False, 2.0, "")


@pytest.fixture
def root(tmp_path):
    """Returns a folder with one source and its tests."""
    (tmp_path / "source.py").write_text("less = x < y\nmore = x > y\n")
    (tmp_path / "test_source.py").write_text("")
    return tmp_path


def test_every_fault_fits_its_file_and_has_tests():
    mutants = load()
    assert len(mutants) >= 80
    check(mutants)


def test_a_fault_that_fits_is_let_through(root):
    check([FAULT], root)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"find": "x == y"}, "its text is in source.py 0 times, must be once"),
        ({"find": "= x"}, "its text is in source.py 2 times, must be once"),
        ({"file": "gone.py"}, "gone.py does not exist"),
        ({"replace": "x < y"}, "it replaces its text by the same"),
        ({"tests": ("test_source.py", "test_gone.py")}, "must name files of tests, .*test_gone"),
        ({"tests": ()}, "must name files of tests"),
    ],
)
def test_a_fault_that_does_not_fit_is_refused_by_name(root, change, said):
    with pytest.raises(ValueError, match=f"^odd: {said}"):
        check([FAULT, replace(FAULT, name="odd", **change)], root)


def test_two_faults_of_one_name_are_refused(root):
    with pytest.raises(ValueError, match="a fault: another fault has this name"):
        check([FAULT, FAULT], root)


def test_entries_of_other_fields_are_refused(tmp_path):
    file = tmp_path / LIST.name
    file.write_text('[[mutant]]\nname = "odd"\nfile = "source.py"\n')
    with pytest.raises(ValueError, match=r"^odd: must have \['file', 'find', "):
        load(file)


def test_a_fault_is_put_in_and_taken_out_again(root):
    """And no two versions of a file share a time, by which Python knows bytecode."""
    file = root / "source.py"
    text, times = file.read_text(), [int(file.stat().st_mtime)]
    for _ in range(2):
        with put_in(root, FAULT):
            assert file.read_text() == "less = x <= y\nmore = x > y\n"
            times.append(int(os.stat(file).st_mtime))
        assert file.read_text() == text
        assert int(file.stat().st_mtime) == times[0]
    assert len(set(times)) == 3


@pytest.mark.parametrize(
    ("run", "tier", "how"),
    [
        (RUN, "default", "test"),
        (replace(RUN, code=None), "slow", "time-out"),
        (replace(RUN, code=2, collection=True), "default", "collection"),
        (replace(RUN, code=1, collection=True), "default", "collection"),
        (replace(RUN, code=0, failure=""), "default", None),
        (replace(RUN, code=5, failure=""), "slow", None),
    ],
)
def test_runs_are_judged_by_how_they_end(run, tier, how):
    found = judged(FAULT, tier, run)
    assert (found.how, found.tier) == (how, how and tier)
    assert (found.killed_by is None) == (how is None)


@pytest.mark.parametrize(
    ("summary", "found"),
    [
        ("FAILED a.py::test_b[c - d] - assert [1]\n", ("a.py::test_b[c - d]", False)),
        ("SKIPPED [1] a.py:3: no\nFAILED a.py::test_b\n1 failed", ("a.py::test_b", False)),
        ("ERROR a.py::test_b - OSError\n", ("a.py::test_b", False)),
        ("ERROR a.py - SyntaxError: x\n", ("a.py", True)),
        ("1 passed in 0.1s", ("", False)),
    ],
)
def test_the_first_failure_is_that_of_the_summary(summary, found):
    logged = "ERROR    server:app.py:3 a request has failed\n"
    assert first_failure(f"{logged}=== short test summary info ===\n{summary}") == found


@pytest.mark.parametrize(
    ("code", "tier"), [(2, "default"), (3, "default"), (4, "slow"), (5, "default"), (-11, "slow")]
)
def test_a_run_that_pytest_itself_spoilt_is_an_error(code, tier):
    with pytest.raises(RuntimeError, match=f"a fault: pytest ended with {code}"):
        judged(FAULT, tier, replace(RUN, code=code))


def test_shares_are_of_all_faults():
    tiers = ["default", "default", "slow", None]
    found = [
        Verdict(f"{nth}", "source.py", tier, tier, None, 1.0) for nth, tier in enumerate(tiers)
    ]
    assert shares(found, full=False) == {"default": 0.5}
    assert shares(found, full=True) == {"default": 0.5, "default+slow": 0.75}
