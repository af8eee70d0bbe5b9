"""bench.quality: its sets name policies, and the report of several lengths is theirs side by side."""

import pytest

from bench.quality import SETS, joined
from jsparse.evaluation.statistics import averages, summarize
from jsparse.policies import parse


@pytest.mark.parametrize("name", SETS)
def test_every_policy_of_a_set_is_one(name):
    built = [parse(expression) for expression in SETS[name]]
    assert len(set(built)) == len(built)


def report(length):
    scores = {"dense()": 1.0, "quest(budget=16)": 0.5}
    entries = [
        {"policy": policy, "task": "vt", "length": length, "index": i, "values": {"score": score}, "meta": {}}
        for policy, score in scores.items()
        for i in range(3)
    ]
    cells = summarize(entries)
    settings = {"lengths": [length], "samples": 3}
    return {"timestamp": "now", "environment": {"device": "x"}, "settings": settings, "cells": cells}


def test_lengths_are_joined_without_their_samples():
    one, two = report(128), report(256)
    whole = joined([one, two])
    assert whole["settings"] == {"lengths": [128, 256], "samples": 3}
    assert [(cell["policy"], cell["length"]) for cell in whole["cells"]] == [
        (policy, length) for length in (128, 256) for policy in ("dense()", "quest(budget=16)")
    ]
    assert all("samples" not in cell for cell in whole["cells"])
    assert whole["cells"][3]["metrics"] == two["cells"][1]["metrics"]
    assert whole["averages"] == averages([*one["cells"], *two["cells"]])
    assert whole["environment"]["device"] == "x"
    assert "git_revision" in whole["environment"]
