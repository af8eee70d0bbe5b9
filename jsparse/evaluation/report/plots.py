"""Plots a run's result from its JSON: quality over attended fraction, needle and head heat maps.

Plots need nothing but that JSON and matplotlib, whose settings and windows they leave alone.
"""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jsparse.evaluation.report.statistics import BY_STEP, STEP_BLOCK, YARDSTICK, family, is_dense
from jsparse.evaluation.report.table import FORMATS, tokens
from jsparse.machine.extras import install
from jsparse.text.signatures import short_name

QUALITY = ("kl", "agreement", "score")
STEPPED = ("kl", "perplexity")
RATIO = "ratio"
LABELS = {**FORMATS, RATIO: ("KL / yardstick's KL", 1, ".3g")}
COLUMNS, DPI = 4, 120
PANEL = (4.0, 3.6)  # inches
HEADING = 1.0  # inches for title and legend
STEP = 0.05  # the range of depths in one row of the needle's map

FEW_TICKS = 7
PAD = 1.15  # what an axis shows beyond its outermost ticks
ROUNDING = 1e-6
TICK_SIZE = 8
# what an SVG writes in black is light on a dark page
INK = (
    "<style>:root { --ink: #1c1d1f } text { fill: var(--ink) } "
    "@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e3 } }</style>"
)

DrawFn = Callable[[Any], Any]


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
    lengths = {cell["length"] for cell in report["cells"]}
    columns = len(lengths) if len(lengths) > 1 else COLUMNS
    needed = "kl, agreement or an averaged score beside attended"
    _save(report, _quality_panels(report), path, needed, columns)


def plot_niah(report: Mapping[str, Any], path: Path | str, task: str = "niah_grid") -> None:
    """Plots the mean score over depth and length, one panel per policy.

    A row holds the depths that round to it, in steps of 5 %.
    """
    _save(report, _niah_panels(report, task), path, f"samples of {task} with a depth")


def plot_heads(report: Mapping[str, Any], path: Path | str) -> None:
    """Plots the attended fraction of each layer and KV head, mean over samples.

    There is one panel per policy and length.
    """
    _save(report, _heads_panels(report), path, "samples with attended_heads")


def plot_by_step(report: Mapping[str, Any], path: Path | str) -> None:
    """Plots KL and perplexity over the decode step, with one line per policy.

    There is one panel per metric, task and length.
    """
    _save(report, _by_step_panels(report), path, "means by step", 2)


def pictures(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns all that can be drawn, as SVGs by plot and title of the panel, for light and dark."""
    plots = {
        "quality": _quality_panels(report),
        "by_step": _by_step_panels(report),
        "niah": _niah_panels(report, "niah_grid"),
        "heads": _heads_panels(report),
    }
    return {
        name: {title: _svg(title, draw) for title, draw in panels.items()}
        for name, panels in plots.items()
        if panels
    }


def _quality_panels(report: Mapping[str, Any]) -> dict[str, DrawFn]:
    families = list(dict.fromkeys(family(cell["policy"]) for cell in report["cells"]))
    lengths = sorted({cell["length"] for cell in report["cells"]})
    return {
        f"{LABELS[metric][0]}, {tokens(length)} tokens": _quality(metric, points, families)
        for metric in (*QUALITY, RATIO)
        for length in lengths
        if (points := quality_points(report, metric, length))
    }


def _niah_panels(report: Mapping[str, Any], task: str) -> dict[str, DrawFn]:
    scores: dict[str, dict[tuple[float, int], list[float]]] = {}
    for cell, sample in _samples(report, "depth"):
        if cell["task"] == task:
            place = STEP * round(sample["meta"]["depth"] / STEP), cell["length"]
            scores.setdefault(cell["policy"], {}).setdefault(place, []).append(
                sample["values"]["score"]
            )
    return {short_name(policy): _needles(places) for policy, places in scores.items()}


def _heads_panels(report: Mapping[str, Any]) -> dict[str, DrawFn]:
    heads: dict[str, list[Any]] = {}
    for cell, sample in _samples(report, "attended_heads"):
        title = f"{short_name(cell['policy'])}, {tokens(cell['length'])} tokens"
        heads.setdefault(title, []).append(sample["meta"]["attended_heads"])
    return {title: _heads(np.array(fractions, float)) for title, fractions in heads.items()}


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
            panels[title] = _stepped(metric, of_panel, policies)
    return panels


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


def _quality(metric: str, points: Mapping[str, list[Point]], families: Sequence[str]) -> DrawFn:
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
        _log(axis.xaxis, [point.attended for line in points.values() for point in line], _percent)
        if metric in ("kl", RATIO):
            _log(axis.yaxis, [factor * point.value for line in points.values() for point in line])
        axis.grid(alpha=0.3)
        axis.set(xlabel="tokens attended to", ylabel=label)

    return draw


def _stepped(metric: str, lines: Mapping[str, list[float]], policies: Sequence[str]) -> DrawFn:
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
            _log(axis.yaxis, [value for values in lines.values() for value in values])
        axis.grid(alpha=0.3)
        axis.set(xlabel="decode step", ylabel=LABELS[metric][0])

    return draw


def _log(
    axis: Any, values: Sequence[float], form: Callable[[float], str] = "{:.3g}".format
) -> None:
    """Makes an axis logarithmic, with ticks at round numbers around its values; 0 is left out."""
    from matplotlib.ticker import NullLocator

    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log", nonpositive="mask")
    found = log_ticks([value for value in values if value > 0])
    if not found:
        return
    axis.set_ticks(found, labels=[form(tick) for tick in found])
    axis.set_minor_locator(NullLocator())
    axis.set_tick_params(labelsize=TICK_SIZE)
    low, high = found[0] / PAD, found[-1] * PAD
    axis.set_view_interval(low, high, ignore=True)


def log_ticks(values: Sequence[float]) -> list[float]:
    """Returns round numbers, of which the first and the last lie around the values: 2, 5, 10, 20.

    They are 1, 2 and 5 times powers of ten, or, where these would be many, powers of ten alone.
    """
    if not values:
        return []
    # shares that rounding has put above 1 are 1
    low, high = min(values) * (1 + ROUNDING), max(values) * (1 - ROUNDING)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        below = [tick for tick in ticks if tick <= low]
        above = [tick for tick in ticks if tick >= high]
        kept = [tick for tick in ticks if below[-1] <= tick <= above[0]]
        if len(kept) <= FEW_TICKS:
            break
    return kept


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _needles(scores: Mapping[tuple[float, int], list[float]]) -> DrawFn:
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


def _heads(fractions: np.ndarray) -> DrawFn:
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
    panels: Mapping[str, DrawFn],
    path: Path | str,
    needed: str,
    columns: int = COLUMNS,
) -> None:
    """Draws equally large panels by title, under a heading that says what was run where."""
    if not panels:
        raise ValueError(f"nothing to draw for {path}: the result must hold {needed}")
    _figure_of(panels, columns, _heading(report)).savefig(path, dpi=DPI)


def _svg(title: str, draw: DrawFn) -> str:
    """Returns a panel as an SVG without ground, whose black is that of the page's theme."""
    figure = _figure_of({title: draw}, 1)
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jsparse"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue().replace("#000000", "var(--ink)")
    begin = text.index(">", text.index("<svg")) + 1
    return text[text.index("<svg") : begin] + INK + text[begin:]


def _figure_of(panels: Mapping[str, DrawFn], columns: int, heading: str | None = None) -> Any:
    """Returns a figure of equally large panels, with one legend for all."""
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
            frameon=False,
        )
    if heading:
        figure.suptitle(textwrap.fill(heading, 30 * columns), fontsize=8)
    return figure


def _heading(report: Mapping[str, Any]) -> str:
    settings, environment = report["settings"], report["environment"]
    devices = ", ".join(dict.fromkeys(gpu["name"] for gpu in environment.get("gpus", ()))) or "CPU"
    parts = [settings["model"], settings["dtype"], devices, report["timestamp"][:10]]
    if revision := environment.get("git_revision"):
        parts.append(f"revision {revision[:10]}")
    return ", ".join(parts)
