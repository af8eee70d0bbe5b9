"""Plots a run's result from its JSON: quality over attended fraction, needle and head heat maps.

Plots need nothing but that JSON and matplotlib, whose settings and windows they leave alone.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jsparse.evaluation.report.statistics import BY_STEP, STEP_BLOCK, YARDSTICK, family, is_dense
from jsparse.evaluation.report.table import FORMATS, tokens
from jsparse.extras import install
from jsparse.signatures import short_name

QUALITY = ("kl", "agreement", "score")
STEPPED = ("kl", "perplexity")
RATIO = "ratio"
LABELS = {**FORMATS, RATIO: ("KL / yardstick's KL", 1, ".3g")}
COLUMNS, DPI = 4, 120
PANEL = (4.0, 3.6)  # inches
HEADING = 1.0  # inches for title and legend
STEP = 0.05  # the range of depths in one row of the needle's map

Draw = Callable[[Any], Any]


class Point(NamedTuple):
    """Places a policy in the plot of quality."""

    policy: str
    attended: float
    value: float


def plot_quality(report: Mapping[str, Any], path: Path | str) -> None:
    """Plots KL, agreement and score over the attended fraction.

    There is one panel per metric and length, a row per metric where there are several lengths, with
    one line per family of policies, and one of KL over the yardstick's where that was measured.
    """
    families = list(dict.fromkeys(family(cell["policy"]) for cell in report["cells"]))
    lengths = sorted({cell["length"] for cell in report["cells"]})
    panels = {
        f"{LABELS[metric][0]}, {tokens(length)} tokens": _quality(metric, points, families)
        for metric in (*QUALITY, RATIO)
        for length in lengths
        if (points := quality_points(report, metric, length))
    }
    columns = len(lengths) if len(lengths) > 1 else COLUMNS
    _save(report, panels, path, "kl, agreement or an averaged score beside attended", columns)


def plot_niah(report: Mapping[str, Any], path: Path | str, task: str = "niah_grid") -> None:
    """Plots the mean score over depth and length, one panel per policy.

    A row holds the depths that round to it, in steps of 5 %.
    """
    scores: dict[str, dict[tuple[float, int], list[float]]] = {}
    for cell, sample in _samples(report, "depth"):
        if cell["task"] == task:
            place = STEP * round(sample["meta"]["depth"] / STEP), cell["length"]
            scores.setdefault(cell["policy"], {}).setdefault(place, []).append(
                sample["values"]["score"]
            )
    panels = {short_name(policy): _needles(places) for policy, places in scores.items()}
    _save(report, panels, path, f"samples of {task} with a depth")


def plot_heads(report: Mapping[str, Any], path: Path | str) -> None:
    """Plots the attended fraction of each layer and KV head, mean over samples.

    There is one panel per policy and length.
    """
    heads: dict[str, list[Any]] = {}
    for cell, sample in _samples(report, "attended_heads"):
        title = f"{short_name(cell['policy'])}, {tokens(cell['length'])} tokens"
        heads.setdefault(title, []).append(sample["meta"]["attended_heads"])
    panels = {title: _heads(np.array(fractions, float)) for title, fractions in heads.items()}
    _save(report, panels, path, "samples with attended_heads")


def plot_by_step(report: Mapping[str, Any], path: Path | str) -> None:
    """Plots KL and perplexity over the decode step, with one line per policy.

    There is one panel per metric, task and length.
    """
    panels: dict[str, Draw] = {}
    policies = list(dict.fromkeys(cell["policy"] for cell in report["cells"]))
    for metric in STEPPED:
        lines: dict[tuple[str, int], dict[str, list[float]]] = {}
        for cell in report["cells"]:
            if BY_STEP in cell and not (metric == "kl" and is_dense(cell["policy"])):
                of_panel = lines.setdefault((cell["task"], cell["length"]), {})
                of_panel[cell["policy"]] = cell[BY_STEP][metric]
        for (task, length), of_panel in sorted(lines.items()):
            title = f"{LABELS[metric][0]} of {task}, {tokens(length)} tokens"
            panels[title] = _stepped(metric, of_panel, policies)
    _save(report, panels, path, "means by step", 2)


def quality_points(report: Mapping[str, Any], metric: str, length: int) -> dict[str, list[Point]]:
    """Returns each family's points, by attended fraction.

    Points are means over the tasks that have the metric; for score, over the averaged tasks. For
    the ratio of a yardstick, the attended fraction is the policy's where its KL was measured.
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
        points.setdefault(family(policy), []).append(Point(policy, attended, value))
    return {name: sorted(line, key=lambda point: point.attended) for name, line in points.items()}


def _quality(metric: str, points: Mapping[str, list[Point]], families: Sequence[str]) -> Draw:
    label, factor, _ = LABELS[metric]

    def draw(axis: Any) -> None:
        for name, line in points.items():
            color, marker = ("black", "*") if is_dense(name) else (f"C{families.index(name)}", "o")
            values = [factor * point.value for point in line]
            axis.plot(
                [point.attended for point in line], values, label=name, color=color, marker=marker
            )
            if is_dense(name) and metric != "kl":
                axis.axhline(values[0], color="black", linewidth=0.8)
        if metric == RATIO:
            axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        if metric in ("kl", RATIO):
            axis.set_yscale("log", nonpositive="mask")  # dense's own KL is 0
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:.3g}")
        axis.grid(alpha=0.3)
        axis.set(xlabel="attended fraction", ylabel=label)

    return draw


def _stepped(metric: str, lines: Mapping[str, list[float]], policies: Sequence[str]) -> Draw:
    def draw(axis: Any) -> None:
        for policy, values in lines.items():
            steps = [STEP_BLOCK * (block + 0.5) for block in range(len(values))]
            nth = policies.index(policy)
            style = ("-", "--", ":", "-.")[nth // 10 % 4]
            color = "black" if is_dense(policy) else f"C{nth % 10}"
            axis.plot(
                steps,
                values,
                label=textwrap.fill(short_name(policy), 60),
                color=color,
                linestyle=style,
            )
        if metric == "kl":
            axis.set_yscale("log", nonpositive="mask")
        axis.grid(alpha=0.3)
        axis.set(xlabel="decode step", ylabel=LABELS[metric][0])

    return draw


def _needles(scores: Mapping[tuple[float, int], list[float]]) -> Draw:
    depths, lengths = (sorted(set(axis)) for axis in zip(*scores, strict=True))
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), found in scores.items():
        grid[depths.index(depth), lengths.index(length)] = np.mean(found)

    def draw(axis: Any) -> None:
        _image(axis, grid, "RdYlGn", 1.0)
        axis.set_xticks(range(len(lengths)), map(tokens, lengths))
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set(xlabel="tokens", ylabel="depth")

    return draw


def _heads(fractions: np.ndarray) -> Draw:
    """Returns the drawing of fractions [samples, L, K]."""
    means = np.ma.masked_invalid(fractions).mean(axis=0)

    def draw(axis: Any) -> None:
        _image(axis, means, "viridis", 0.5)
        axis.set(xlabel="KV head", ylabel="layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)

    return draw


def _image(axis: Any, grid: np.ndarray, colours: str, gamma: float) -> None:
    """Draws numbers from 0 to 1 as colours; gamma below 1 spreads the small ones."""
    from matplotlib.colors import PowerNorm

    image = axis.imshow(
        grid, cmap=colours, norm=PowerNorm(gamma, 0, 1), aspect="auto", interpolation="none"
    )
    axis.figure.colorbar(image, ax=axis)


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


def _save(
    report: Mapping[str, Any],
    panels: Mapping[str, Draw],
    path: Path | str,
    needed: str,
    columns: int = COLUMNS,
) -> None:
    """Draws equally large panels by title, under a heading that says what was run where."""
    if not panels:
        raise ValueError(f"nothing to draw for {path}: the result must hold {needed}")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"plots need {error.name}: {install('eval')}") from None
    columns = min(len(panels), columns)
    rows = -(-len(panels) // columns)
    figure = Figure((PANEL[0] * columns, PANEL[1] * rows + HEADING), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (title, draw) in zip(axes, panels.items(), strict=False):
        draw(axis)
        axis.set_title(textwrap.fill(title, 40), fontsize=9)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    named = {
        label: line
        for axis in figure.axes
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if named:
        wide = max(map(len, named)) > 40
        figure.legend(
            named.values(),
            named.keys(),
            loc="outside lower center",
            ncols=2 if wide or columns == 1 else 4,
            fontsize=5 if wide else None,
        )
    figure.suptitle(textwrap.fill(_heading(report), 30 * columns), fontsize=8)
    figure.savefig(path, dpi=DPI)


def _heading(report: Mapping[str, Any]) -> str:
    settings, environment = report["settings"], report["environment"]
    devices = ", ".join(dict.fromkeys(gpu["name"] for gpu in environment.get("gpus", ()))) or "CPU"
    revision = (environment.get("git_revision") or "unknown")[:10]
    return (
        f"{settings['model']}, {settings['dtype']}, {devices}, {report['timestamp'][:10]}, "
        f"revision {revision}"
    )
