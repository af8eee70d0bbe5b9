"""Tests the plots of a report, which are drawn only from its JSON."""

import json

import pytest

from jsparse.evaluation.report.drawings import log_ticks
from jsparse.evaluation.report.plots import pictures, quality_points
from jsparse.evaluation.statistics import BY_STEP, YARDSTICK, averages, summarize
from tests.support.made_up_report import DENSE, POLICIES, SHORT, TOP_K, entry, report

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def made():
    """A report with means by step only for the task drift."""
    found = json.loads(json.dumps(report()))
    for i, cell in enumerate(cell for cell in found["cells"] if cell["task"] == "drift"):
        cell[BY_STEP] = {"kl": [0.01 * (i + 1), 0.02], "perplexity": [9.0, 8.0 + i]}
    return found


def by_title(figures):
    """The axes of figures by title. Colour bars have no title."""
    axes = [axis for figure in figures for axis in figure.axes]
    return {axis.get_title().replace("\n", " "): axis for axis in axes if axis.get_title()}


def panels(report, figures):
    pictures(report)
    return by_title(figures)


@pytest.fixture(scope="module")
def drawn(made):
    """The pictures of the report, drawn once, and their axes by title."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig

    def savefig(figure, *given, **how):
        saved.append(figure)
        return save(figure, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        return pictures(made), by_title(saved)


def test_lines_over_steps(made, drawn):
    """Dense attention has no KL; tasks without means by step have no panel."""
    cells = [cell for cell in made["cells"] if cell["task"] == "drift"]
    drawn = drawn[1]
    drawn = {title: axis for title, axis in drawn.items() if " of " in title}
    assert list(drawn) == [
        f"{name} of drift, {length} tokens"
        for name in ("KL", "perplexity")
        for length in ("1K", "4K")
    ]
    for title, axis in drawn.items():
        assert len(axis.lines) == len(POLICIES) - title.startswith("KL")
        length = 4096 if "4K" in title else 1024
        shown = dict(zip(POLICIES, SHORT, strict=True))
        by_policy = {shown[cell["policy"]]: cell for cell in cells if cell["length"] == length}
        for line in axis.lines:
            metric = "kl" if title.startswith("KL") else "perplexity"
            assert line.get_xdata().tolist() == [32.0, 96.0]
            values = by_policy[line.get_label().replace("\n", " ")][BY_STEP][metric]
            assert line.get_ydata().tolist() == values


def test_share_ticks_are_round_percentages(drawn):
    axis = drawn[1]["agreement %, 1K tokens"]  # 6.25 %, 12.5 %, 18.75 %, 100 %
    ticks = ["5 %", "10 %", "20 %", "50 %", "100 %"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ticks
    assert list(axis.get_xticks(minor=True)) == []
    low, high = axis.get_xlim()
    assert low < 0.05 and 1 < high < 2


@pytest.mark.pure
def test_log_ticks_enclose_the_values():
    for values, ticks in [
        ([], []),
        ([0.3, 0.45], [0.2, 0.5]),
        ([0.06, 1.00000003], [0.05, 0.1, 0.2, 0.5, 1]),
        ([1], [1]),
        ([0.0012, 0.9], [0.001, 0.01, 0.1, 1]),
        ([2, 30], [2, 5, 10, 20, 50]),
    ]:
        assert log_ticks(values) == ticks, values


def test_pictures_are_svgs_for_light_and_dark(drawn):
    made, _ = drawn
    assert {*made} == {"quality", "by_step", "niah", "heads"}
    assert list(made["niah"]) == list(SHORT)
    for panels_of in made.values():
        for title, svg in panels_of.items():
            assert svg.startswith("<svg") and "</svg>" in svg
            assert "prefers-color-scheme: dark" in svg
            assert "#000000" not in svg
            assert title in svg.replace("\n", " ")
    assert pictures(report() | {"cells": [], "averages": []}) == {}


def test_quality_points_are_means_over_solved_tasks():
    values = {("a", DENSE): 1.0, ("a", TOP_K): 0.8, ("b", DENSE): 0.5, ("b", TOP_K): 0.4}
    values |= {("fails", DENSE): 0.0, ("fails", TOP_K): 1.0}
    made = [
        entry(policy, task, 64, i, score=score, attended={"a": 0.2, "b": 0.4, "fails": 0.9}[task])
        for (task, policy), score in values.items()
        for i in range(2)
    ]
    cells = summarize(
        [*made, entry(TOP_K, "c", 64, 0, kl=0.5), entry(TOP_K, "d", 128, 0, kl=0.5, attended=0.1)]
    )
    result = {"cells": cells, "averages": averages(cells)}
    points = quality_points(result, "score", 64)
    assert list(points) == ["dense", "oracle_top_k"]
    assert points["oracle_top_k"] == [(TOP_K, pytest.approx(0.3), pytest.approx(0.6))]
    assert quality_points(result, "kl", 64) == {}, "without attended there is no place"
    assert quality_points(result, "kl", 128) == {"oracle_top_k": [(TOP_K, 0.1, 0.5)]}


def test_ratio_to_a_yardstick_has_a_panel(figures):
    """Plotted at the attended fraction of the policy; samples without a yardstick have no point."""
    made = [
        entry(policy, task, 64, i, kl=kl, **more)
        for policy, own in ((TOP_K, 0.3), ("quest(budget=8)", 0.6))
        for task, kl, more in (("kl", own, {"attended": 0.25}), (YARDSTICK, 0.3, {}))
        for i in range(2)
    ]
    made += [entry(DENSE, "kl", 64, 0, kl=0, attended=1), entry(DENSE, YARDSTICK, 64, 0)]
    result = report() | {"cells": summarize(made)}
    assert quality_points(result, "ratio", 64) == {
        "oracle_top_k": [(TOP_K, 0.25, 1)],
        "quest": [("quest(budget=8)", 0.25, 2)],
    }
    assert quality_points(result, "ratio", 128) == {}
    axes = panels(result, figures)
    assert list(axes) == ["KL, 64 tokens", "KL / yardstick's KL, 64 tokens"]
    assert len(axes["KL, 64 tokens"].get_lines()) == 3


def test_needle_map_matches_hand_counting(drawn):
    axis = drawn[1][SHORT[1]]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1K", "4K"]
    depths = ["0%", "15%", "30%", "45%", "55%", "70%", "85%", "100%"]
    assert [label.get_text() for label in axis.get_yticklabels()] == depths
    assert axis.get_images()[0].get_array().tolist() == [[0, 0]] + [[1, 1]] * 7


def test_head_map_is_the_mean_over_samples(figures):
    heads = [[[1.0, None], [0.5, 0.0]], [[0.5, None], [None, 0.5]]]
    made = report() | {
        "cells": summarize(
            entry(DENSE, "a", 64, i, {"attended_heads": h}, kl=0) for i, h in enumerate(heads)
        )
    }
    (image,) = panels(made, figures)["dense(), 64 tokens"].get_images()
    assert image.get_array().filled(-1).tolist() == [[0.75, -1], [0.5, 0.25]]
