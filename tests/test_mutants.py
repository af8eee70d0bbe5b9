"""Tests that all faults of mutants.toml can be put in, and how faults are drawn and judged."""

import json
import os
import time
from dataclasses import replace

import pytest

from tests.mutants import (
    LIST,
    ROOT,
    Mutant,
    Run,
    Verdict,
    check,
    first_failure,
    judged,
    load,
    put_in,
    require_packages,
    shares,
)
from tests.random_mutants import Judges, Measured, Sampler, Sites, sources, within

FAULT = Mutant("a fault", "source.py", "x < y", "x <= y", ("test_source.py",))
RUN = Run(1, "test_source.py::test_less", False, 2.0, "")


@pytest.fixture
def root(tmp_path):
    """A folder with one source and its tests."""
    (tmp_path / "source.py").write_text("less = x < y\nmore = x > y\n")
    (tmp_path / "test_source.py").write_text("")
    return tmp_path


def test_every_fault_fits_its_file_and_has_tests():
    mutants = load()
    assert len(mutants) >= 80
    check(mutants)


def test_record_has_exactly_the_listed_faults():
    record = json.loads((ROOT / "bench/results/mutants/cpu.json").read_text(encoding="utf-8"))
    assert sorted(found["name"] for found in record["verdicts"]) == sorted(x.name for x in load())


def test_valid_fault_is_accepted(root):
    check([FAULT], root)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"find": "x == y"}, "its text is in source.py 0 times, must be once"),
        ({"find": "= x"}, "its text is in source.py 2 times, must be once"),
        ({"file": "gone.py"}, "gone.py does not exist"),
        ({"replace": "x < y"}, "it replaces its text by the same"),
        ({"tests": ("test_source.py", "test_gone.py")}, "must name files of tests, .*test_gone"),
        ({"tests": ("test_gone.py::test_less",)}, "must name files of tests, .*test_gone"),
        ({"tests": ()}, "must name files of tests"),
    ],
)
def test_fault_that_does_not_fit_is_refused_by_name(root, change, said):
    with pytest.raises(ValueError, match=f"^odd: {said}"):
        check([FAULT, replace(FAULT, name="odd", **change)], root)


def test_duplicate_fault_name_is_refused(root):
    with pytest.raises(ValueError, match="a fault: another fault has this name"):
        check([FAULT, FAULT], root)


def test_faults_are_refused_without_their_package():
    with pytest.raises(ValueError, match="1 faults need the package no_such_package"):
        require_packages([FAULT, replace(FAULT, needs="no_such_package")])
    require_packages([FAULT, replace(FAULT, needs="pytest")])


def test_entries_with_other_fields_are_refused(tmp_path):
    file = tmp_path / LIST.name
    file.write_text('[[mutant]]\nname = "odd"\nfile = "source.py"\n')
    with pytest.raises(ValueError, match=r"^odd: must have \['file', 'find', "):
        load(file)


def test_fault_is_put_in_and_removed_again(root):
    """No two versions of a file share a time, by which Python identifies bytecode."""
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
def test_runs_are_judged_by_their_exit(run, tier, how):
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
def test_first_failure_is_that_of_the_summary(summary, found):
    logged = "ERROR    server:app.py:3 a request has failed\n"
    assert first_failure(f"{logged}=== short test summary info ===\n{summary}") == found


@pytest.mark.parametrize(
    ("code", "tier"), [(2, "default"), (3, "default"), (4, "slow"), (5, "default"), (-11, "slow")]
)
def test_run_spoilt_by_pytest_itself_is_an_error(code, tier):
    with pytest.raises(RuntimeError, match=f"a fault: pytest ended with {code}"):
        judged(FAULT, tier, replace(RUN, code=code))


def test_shares_cover_all_faults():
    tiers = ["default", "default", "slow", None]
    found = [
        Verdict(f"{nth}", "source.py", tier, tier, None, 1.0) for nth, tier in enumerate(tiers)
    ]
    assert shares(found, full=False) == {"default": 0.5}
    assert shares(found, full=True) == {"default": 0.5, "default+slow": 0.75}


SOURCE = '''"""Has 1 < 2."""
if TYPE_CHECKING:
    x = 3
LIMIT: Literal[4] = 5  # été
def f(a: int = 6) -> Literal[7]:
    if "é" in a and (b or a >= 0.5):
        raise ValueError(f"{a + 8}")
    log.info("x", 9)
    return [y for y in a if not y == a - b], "z" + a
'''
FAULTS = {
    4: ["5 -> 6"],
    5: ["6 -> 7"],
    6: [
        '"é" in a and (b or a >= 0.5) -> (not ("é" in a and (b or a >= 0.5)))',
        '"é" in a and (b or a >= 0.5) -> ((b or a >= 0.5))',
        '"é" in a and (b or a >= 0.5) -> (("é" in a))',
        "in -> not in",
        "b or a >= 0.5 -> ((a >= 0.5))",
        "b or a >= 0.5 -> ((b))",
        ">= -> >",
        "0.5 -> 1.0",
    ],
    9: ["not y == a - b -> (not (not y == a - b))", "== -> !=", "- -> +", "a - b -> (a)"],
}


def test_places_for_random_faults_are_in_code_that_computes():
    found = Sites("s.py", SOURCE).found
    assert {(site.lines[0], site.name.partition(": ")[2]) for site in found} == {
        (line, text.replace("  ", " ")) for line, texts in FAULTS.items() for text in texts
    }
    changed = {site.text(SOURCE.encode()).decode() for site in found}
    assert SOURCE.replace(">=", ">") in changed and SOURCE.replace("a - b", "(a)") in changed
    assert len(changed) == len(found)


def test_every_source_of_the_package_is_drawn_from_once():
    files = sources(ROOT)
    assert {"jsparse/selection/threshold.py", "models/layers.py", "train/distill.py"} < {*files}
    assert len({(ROOT / file).resolve() for file in files}) == len(files)


def test_cheapest_files_that_execute_the_line_judge_a_fault():
    """At import all do, and then those that enter a function of the module."""
    sites = Sites("s.py", SOURCE)
    slow = Measured("slow", 9.0, [], {"s.py": [4, 5, 6, 9]})
    quick = Measured("quick", 2.0, [], {"s.py": [4, 5, 6]})
    imports = Measured("imports", 1.0, [], {"s.py": [4, 5]})
    judges = Judges([slow, imports, quick, Measured("other", 0.0, [], {})])
    found = {
        site.lines[0]: [one.test for one in judges.executing(site, sites.bodies)]
        for site in sites.found
    }
    assert found == {4: ["quick", "slow"], 5: ["quick", "slow"], 6: ["quick", "slow"], 9: ["slow"]}
    assert within([slow, quick], 4.0) == [slow]
    assert within([imports, slow, quick], 4.0) == [imports, quick]


def test_nearest_files_judge_a_fault_first():
    """A file named after the source precedes the others of its folder, ordered by cost."""
    source = "pallas_kernels/merge_splits/triton_gpu.py"
    near = [
        Measured("tests/kernels/test_merge_splits.py", 4.0, [], {source: [1]}),
        Measured("tests/kernels/test_all_ops.py", 2.0, [], {source: [1]}),
        Measured("tests/bench/test_interpret_kernels.py", 3.0, [], {source: [1]}),
        Measured("tests/engine/test_blocks.py", 1.0, [], {source: [1]}),
    ]
    sites = Sites(source, "x = 1")
    assert Judges(near[::-1]).executing(sites.found[0], sites.bodies) == near


class OneCopy:
    """Stands in for copies of the working tree."""

    def map(self, function, items):
        return [function(ROOT, item) for item in items]


def test_sample_resumes_after_its_time_ran_out(tmp_path):
    done = []

    def measure(copy, test):
        done.append(test)
        return Measured(test, 1.0, [], {})

    def work(seconds):
        sampler = Sampler(ROOT, tmp_path, OneCopy(), time.monotonic() + seconds, 1.0)
        return sampler.work("measured", Measured, {"a": "a", "b": "b"}, measure)

    assert work(-1) is None and done == []
    (file,) = tmp_path.rglob("measured.jsonl")
    file.write_text(
        json.dumps(["a", {"test": "a", "seconds": 2.0, "failed": [], "lines": {}}]) + "\n"
    )
    assert work(60) == {
        "a": Measured("a", 2.0, [], {}),
        "b": Measured("b", 1.0, [], {}),
    }
    assert work(-1) is not None and done == ["b"]
