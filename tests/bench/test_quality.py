"""Tests bench.quality: its sets name policies, and reports of several lengths are joined."""

import subprocess
import sys

import numpy as np
import pytest

from bench import quality
from bench.lib.quality_sets import GATE_FILES, SETS
from bench.quality import joined, main, parts
from jsparse.evaluation.plan import plan
from jsparse.evaluation.report.statistics import averages, summarize
from jsparse.policies.expressions import parse
from jsparse.policies.head_gates import HeadGates, save


@pytest.fixture
def gates(tmp_path):
    """Returns a folder of gates of a model of one head."""
    for name in GATE_FILES:
        save(HeadGates(np.ones((1, 1), np.bool_)), tmp_path / name)
    return tmp_path


def test_every_policy_of_a_set_is_one(gates):
    for name in SETS:
        built = [parse(expression) for expression in SETS[name].policies(gates, 4096)]
        assert len(set(built)) == len(built), name


def test_a_sets_own_tasks_and_lengths_can_be_measured():
    for name in SETS:
        made = plan([], SETS[name].tasks, SETS[name].lengths, 1)
        assert (made.tasks, made.lengths) == (tuple(SETS[name].tasks), tuple(SETS[name].lengths)), (
            name
        )


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Runs the command without measuring; returns the work that each process would do."""

    def run(*arguments):
        asked = []

        def measure(args, part, free):
            asked.append((part.length, tuple(args.tasks), tuple(part.policies)))
            return report(part.length, part.policies)

        for name, stub in (
            ("measure", measure),
            ("show", lambda report: None),
            ("write_page", lambda *_: None),
        ):
            monkeypatch.setattr(quality, name, stub)
        monkeypatch.setattr(
            sys, "argv", ["quality", "--json", str(tmp_path / "report.json"), *arguments]
        )
        main()
        return asked

    return run


def test_a_set_is_measured_in_its_own_tasks_and_lengths_unless_others_are_named(measured, gates):
    chosen = SETS["every_method"]
    named = ("--set", "every_method", "--gates", str(gates))
    policies = {length: tuple(chosen.policies(gates, length)) for length in (1024, 4096)}
    assert measured(*named) == [(4096, tuple(chosen.tasks), policies[4096])]
    others = ("--tasks", "vt", "--lengths", "1024")
    assert measured(*named, *others) == [(1024, ("vt",), policies[1024])]
    assert measured("--policy", "quest(budget=16)", "--lengths", "512", "--tasks", "kl") == [
        (512, ("kl",), ("quest(budget=16)",))
    ]
    assert [(length, len(tasks)) for length, tasks, _ in measured()] == [
        (length, 9) for length in (8192, 4096, 2048, 1024)
    ]


def test_steps_are_the_sets_unless_others_are_named(monkeypatch, tmp_path):
    """They reach the command that measures, and a report of other steps is refused."""
    asked = []

    def record(command, **_):
        asked.append(command[command.index("--steps") + 1])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(quality.subprocess, "run", record)
    for arguments in (["--set", "eviction"], ["--set", "eviction", "--steps", "32"], []):
        arguments = ["--policy", "snapkv()", "--lengths", "4096", "--tasks", "kl", *arguments]
        path = str(tmp_path / "report.json")
        monkeypatch.setattr(sys, "argv", ["quality", "--json", path, *arguments])
        with pytest.raises(SystemExit):
            main()
    assert asked == ["512", "32", "64"]


def test_every_policy_is_measured_once_at_every_length():
    for groups in [1, 2, 5]:
        dealt = parts(dict.fromkeys((128, 256), "abcde"), groups)
        pairs = sorted((part.length, policy) for part in dealt for policy in part.policies)
        assert pairs == [(length, policy) for length in (128, 256) for policy in "abcde"], groups
        assert len({part.name for part in dealt}) == len(dealt) == 2 * groups, groups


def report(length, policies=("quest(budget=16)",)):
    scores = dict.fromkeys(("dense()", *policies), 0.5) | {"dense()": 1.0}
    entries = [
        {
            "policy": policy,
            "task": "vt",
            "length": length,
            "index": i,
            "values": {"score": score, "attended": 0.0147},
            "meta": {},
        }
        for policy, score in scores.items()
        for i in range(3)
    ]
    cells = summarize(entries)
    settings = {"lengths": [length], "samples": 3, "policies": list(scores)}
    return {
        "timestamp": "now",
        "environment": {"device": "x"},
        "settings": settings,
        "cells": cells,
    }


def test_lengths_are_joined_without_their_samples():
    one, two = report(128), report(256)
    whole = joined([two, one], {"git_revision": "abc", "device": "other"})
    both = ["dense()", "quest(budget=16)"]
    assert whole["settings"] == {"lengths": [128, 256], "samples": 3, "policies": both}
    assert [(cell["policy"], cell["length"]) for cell in whole["cells"]] == [
        (policy, length) for length in (128, 256) for policy in both
    ]
    assert all("samples" not in cell for cell in whole["cells"])
    assert whole["cells"][3]["metrics"] == two["cells"][1]["metrics"]
    assert whole["averages"] == averages([*one["cells"], *two["cells"]])
    assert whole["environment"] == {"git_revision": "abc", "device": "x"}
