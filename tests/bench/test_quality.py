"""Tests that the sets of bench.quality name existing policies and tasks."""

import numpy as np
import pytest

from bench.lib.quality_sets import GATE_FILES, SETS
from bench.quality import by_text, draw
from jsparse.evaluation.plan import plan
from jsparse.policies.expressions import parse
from jsparse.policies.head_gates import HeadGates, save


@pytest.fixture
def gates(tmp_path):
    """Returns a folder of gates of a model of one head."""
    for name in GATE_FILES:
        save(HeadGates(np.ones((1, 1), np.bool_)), tmp_path / name)
    return tmp_path


def test_every_policy_of_a_set_exists(gates):
    for name in SETS:
        built = [parse(expression) for expression in SETS[name].policies(gates, 4096)]
        assert len(set(built)) == len(built), name


def test_tasks_and_lengths_of_a_set_can_be_measured():
    for name in SETS:
        made = plan([], SETS[name].tasks, SETS[name].lengths, 1)
        assert (made.tasks, made.lengths) == (tuple(SETS[name].tasks), tuple(SETS[name].lengths)), (
            name
        )


def test_means_of_each_text():
    samples = [
        {"meta": {"source": text}, "values": {"kl": kl}}
        for text, kl in (("a", 1), ("b", 4), ("a", 2))
    ]
    assert by_text(samples) == {"texts": {"a": {"kl": 1.5}, "b": {"kl": 4}}}
    assert by_text([{"meta": {}, "values": {"kl": 1}}]) == by_text([]) == {}


def test_finished_report_is_drawn(tmp_path):
    """A panel per length, a line per method."""
    pytest.importorskip("matplotlib")

    def cell(policy, length, attended, kl):
        metrics = {"attended": {"mean": attended}, "kl": {"mean": kl}}
        return {"policy": policy, "task": "kl", "length": length, "metrics": metrics}

    cells = [
        cell("dense()", 1024, 1, 0),
        cell("quest(budget=128)", 1024, 0.125, 0.1),
        cell("quest(budget=256)", 1024, 0.25, 0.01),
        cell("quest(budget=256)", 2048, 0.125, 0.1),
    ]
    report = {"cells": cells, "averages": [], "settings": {"lengths": [1024, 2048]}}
    draw(report, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {text} -->" in drawn for text in ("quest", "1,024 tokens", "2,048 tokens"))
