"""bench.quality: its sets name policies, and the report of several lengths is theirs side by side."""

import pytest

from bench.quality import SETS, devices, joined, parts
from jsparse.evaluation.statistics import averages, summarize
from jsparse.policies import parse


@pytest.mark.parametrize("name", SETS)
def test_every_policy_of_a_set_is_one(name):
    built = [parse(expression) for expression in SETS[name]]
    assert len(set(built)) == len(built)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_every_policy_is_measured_once_at_every_length(groups):
    dealt = parts(["a", "b", "c", "d", "e"], [128, 256], groups)
    pairs = sorted((part.length, policy) for part in dealt for policy in part.policies)
    assert pairs == [(length, policy) for length in (128, 256) for policy in "abcde"]
    assert len({part.name for part in dealt}) == len(dealt) == 2 * groups


def test_more_groups_than_policies_leave_none_empty():
    assert [part.policies for part in parts(["a", "b"], [128], 5)] == [["a"], ["b"]]


def test_processes_take_turns_on_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert list(devices(2, 3).queue) == ["4", "5", "4"]
    with pytest.raises(ValueError, match="gpus=4: must be at most 3"):
        devices(4, 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert list(devices(2, 3).queue) == ["0", "1", "0"]


def report(length, policies=("quest(budget=16)",)):
    scores = dict.fromkeys(("dense()", *policies), 0.5) | {"dense()": 1.0}
    entries = [
        {"policy": policy, "task": "vt", "length": length, "index": i, "values": {"score": score}, "meta": {}}
        for policy, score in scores.items()
        for i in range(3)
    ]
    cells = summarize(entries)
    settings = {"lengths": [length], "samples": 3, "policies": list(scores)}
    return {"timestamp": "now", "environment": {"device": "x"}, "settings": settings, "cells": cells}


def test_lengths_are_joined_without_their_samples():
    one, two = report(128), report(256)
    whole = joined([two, one])
    both = ["dense()", "quest(budget=16)"]
    assert whole["settings"] == {"lengths": [128, 256], "samples": 3, "policies": both}
    assert [(cell["policy"], cell["length"]) for cell in whole["cells"]] == [
        (policy, length) for length in (128, 256) for policy in both
    ]
    assert all("samples" not in cell for cell in whole["cells"])
    assert whole["cells"][3]["metrics"] == two["cells"][1]["metrics"]
    assert whole["averages"] == averages([*one["cells"], *two["cells"]])
    assert whole["environment"]["device"] == "x"
    assert "git_revision" in whole["environment"]


def test_groups_are_joined_with_dense_once():
    whole = joined([report(128, ["a()"]), report(128, ["b()"])])
    assert [cell["policy"] for cell in whole["cells"]] == ["dense()", "a()", "b()"] == whole["settings"]["policies"]
    assert whole["settings"]["lengths"] == [128]
    assert [average["policy"] for average in whole["averages"]] == ["dense()", "a()", "b()"]
