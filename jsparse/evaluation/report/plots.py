"""Plots a run's result from its JSON: quality over attended fraction, needle and head heat maps.

The page of `jsparse eval --report` shows these panels, which need only that JSON and matplotlib.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jsparse.evaluation.report.drawings import (
    LABELS,
    RATIO,
    Point,
    head_map,
    needle_map,
    quality_curves,
    step_curves,
)
from jsparse.evaluation.report.figures import DrawFn, svg
from jsparse.evaluation.report.table import tokens
from jsparse.evaluation.statistics import BY_STEP, YARDSTICK, is_dense
from jsparse.text.short_names import method_name, short_name

QUALITY = ("kl", "agreement", "score")
STEPPED = ("kl", "perplexity")
STEP = 0.05  # the range of depths in one row of the needle's map


def pictures(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns the plots of a report as SVGs, by plot and title of the panel.

    "quality": KL, agreement, score and KL over the yardstick's over the attended fraction, with a
    line per method; "by_step": KL and perplexity over the decode step; "niah": the mean score of
    the needle grid over depth, in steps of 5 %, and length; "heads": the attended fraction by layer
    and KV head.
    """
    plots = {
        "quality": _quality_panels(report),
        "by_step": _by_step_panels(report),
        "niah": _niah_panels(report),
        "heads": _heads_panels(report),
    }
    return {
        name: {title: svg(title, draw) for title, draw in panels.items()}
        for name, panels in plots.items()
        if panels
    }


def _quality_panels(report: Mapping[str, Any]) -> dict[str, DrawFn]:
    methods = methods_of(report)
    lengths = sorted({cell["length"] for cell in report["cells"]})
    return {
        f"{LABELS[metric][0]}, {tokens(length)} tokens": quality_curves(metric, points, methods)
        for metric in (*QUALITY, RATIO)
        for length in lengths
        if (points := quality_points(report, metric, length))
    }


def methods_of(report: Mapping[str, Any]) -> list[str]:
    """Returns the methods of a report, whose policies differ only in how much they attend to."""
    return list(dict.fromkeys(method_name(cell["policy"]) for cell in report["cells"]))


def _niah_panels(report: Mapping[str, Any]) -> dict[str, DrawFn]:
    scores: dict[str, dict[tuple[float, int], list[float]]] = {}
    for cell, sample in _samples(report, "depth"):
        if cell["task"] == "niah_grid":
            place = STEP * round(sample["meta"]["depth"] / STEP), cell["length"]
            scores.setdefault(cell["policy"], {}).setdefault(place, []).append(
                sample["values"]["score"]
            )
    return {short_name(policy): needle_map(places) for policy, places in scores.items()}


def _heads_panels(report: Mapping[str, Any]) -> dict[str, DrawFn]:
    heads: dict[str, list[Any]] = {}
    for cell, sample in _samples(report, "attended_heads"):
        title = f"{short_name(cell['policy'])}, {tokens(cell['length'])} tokens"
        heads.setdefault(title, []).append(sample["meta"]["attended_heads"])
    return {title: head_map(np.array(fractions, float)) for title, fractions in heads.items()}


def _by_step_panels(report: Mapping[str, Any]) -> dict[str, DrawFn]:
    panels: dict[str, DrawFn] = {}
    policies = list(dict.fromkeys(cell["policy"] for cell in report["cells"]))
    for metric in STEPPED:
        lines: dict[tuple[str, int], dict[str, list[float]]] = {}
        for cell in report["cells"]:
            if BY_STEP in cell and not (metric == "kl" and is_dense(cell["policy"])):
                of_panel = lines.setdefault((cell["task"], cell["length"]), {})
                of_panel[cell["policy"]] = cell[BY_STEP][metric]
        for (task, length), of_panel in sorted(lines.items()):
            title = f"{LABELS[metric][0]} of {task}, {tokens(length)} tokens"
            panels[title] = step_curves(metric, of_panel, policies)
    return panels


def quality_points(report: Mapping[str, Any], metric: str, length: int) -> dict[str, list[Point]]:
    """Returns each method's points, by attended fraction: means over the tasks with the metric.

    For score, the means are over the averaged tasks. The ratio's attended fraction is the policy's
    in the task kl.
    """
    averaged = {(row["policy"], row["length"]): row["tasks"] for row in report["averages"]}
    measured: dict[str, list[tuple[float, float]]] = {}
    ratios = {
        cell["policy"]: cell["metrics"]["kl"]["ratio"]
        for cell in report["cells"]
        if cell["task"] == YARDSTICK and cell["length"] == length and cell["metrics"]
    }
    for cell in report["cells"]:
        policy, metrics = cell["policy"], cell["metrics"]
        if metric == RATIO and cell["task"] == "kl" and ratios.get(policy):
            metrics = {**metrics, RATIO: ratios[policy]}
        counts = metric != "score" or cell["task"] in averaged.get((policy, length), ())
        if cell["length"] == length and counts and {metric, "attended"} <= metrics.keys():
            pair = metrics["attended"]["mean"], metrics[metric]["mean"]
            measured.setdefault(policy, []).append(pair)
    points: dict[str, list[Point]] = {}
    for policy, pairs in measured.items():
        attended, value = np.mean(pairs, axis=0).tolist()
        points.setdefault(method_name(policy), []).append(Point(policy, attended, value))
    return {name: sorted(line, key=lambda point: point.attended) for name, line in points.items()}


def _samples(
    report: Mapping[str, Any], key: str
) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields the samples that have `key` in their meta, each after its cell."""
    return (
        (cell, sample)
        for cell in report["cells"]
        for sample in cell["samples"]
        if key in sample["meta"]
    )
