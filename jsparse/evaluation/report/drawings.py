"""Draws the panels of plots: curves of quality and of steps, maps of needles and of heads."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jsparse.evaluation.report.figures import DrawFn
from jsparse.evaluation.report.table import FORMATS, tokens
from jsparse.evaluation.statistics import STEP_BLOCK, is_dense
from jsparse.text.short_names import short_name

RATIO = "ratio"
LABELS = {**FORMATS, RATIO: ("KL / yardstick's KL", 1, ".3g")}
FEW_TICKS = 7
PAD = 1.15  # the factor by which an axis extends beyond its outermost ticks
ROUNDING = 1e-6
TICK_SIZE = 8


class Point(NamedTuple):
    """A policy's point in the plot of quality."""

    policy: str
    attended: float
    value: float


def quality_curves(
    metric: str, points: Mapping[str, list[Point]], methods: Sequence[str]
) -> DrawFn:
    """Returns a function that draws a metric over the attended fraction, one line per method."""
    label, factor, _ = LABELS[metric]

    def draw(axis: Any) -> None:
        for name, line in points.items():
            marker = "*" if is_dense(name) else "o"
            values = [factor * point.value for point in line]
            style = _style(name, methods)
            attended = [point.attended for point in line]
            axis.plot(attended, values, label=name, marker=marker, **style)
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


def step_curves(metric: str, lines: Mapping[str, list[float]], policies: Sequence[str]) -> DrawFn:
    """Returns a function that draws a metric by decode step, one line per policy."""

    def draw(axis: Any) -> None:
        for policy, values in lines.items():
            steps = [STEP_BLOCK * (block + 0.5) for block in range(len(values))]
            label = textwrap.fill(short_name(policy), 60)
            axis.plot(steps, values, label=label, **_style(policy, policies))
        if metric == "kl":
            _log(axis.yaxis, [value for values in lines.values() for value in values])
        axis.grid(alpha=0.3)
        axis.set(xlabel="decode step", ylabel=LABELS[metric][0])

    return draw


def _style(name: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the colour and dashes of a line, different for each of up to forty names."""
    nth = names.index(name)
    return {
        "color": "black" if is_dense(name) else f"C{nth % 10}",
        "linestyle": ("-", "--", ":", "-.")[nth // 10 % 4],
    }


def _log(
    axis: Any, values: Sequence[float], form: Callable[[float], str] = "{:.3g}".format
) -> None:
    """Makes an axis logarithmic, with ticks at round numbers around its values; 0 is left out."""
    from matplotlib.ticker import NullLocator

    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log", nonpositive="mask")
    ticks = log_ticks([value for value in values if value > 0])
    if not ticks:
        return
    axis.set_ticks(ticks, labels=[form(tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())
    axis.set_tick_params(labelsize=TICK_SIZE)
    low, high = ticks[0] / PAD, ticks[-1] * PAD
    axis.set_view_interval(low, high, ignore=True)


def log_ticks(values: Sequence[float]) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten around the values, or only powers of ten if many."""
    if not values:
        return []
    # shares that rounding has moved above 1 are 1
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


def needle_map(scores: Mapping[tuple[float, int], list[float]]) -> DrawFn:
    """Returns a function that draws mean scores by depth and length."""
    depths, lengths = (sorted(set(axis)) for axis in zip(*scores, strict=True))
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), values in scores.items():
        grid[depths.index(depth), lengths.index(length)] = np.mean(values)

    def draw(axis: Any) -> None:
        _image(axis, grid, "RdYlGn", 1.0)
        axis.set_xticks(range(len(lengths)), map(tokens, lengths))
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set(xlabel="tokens", ylabel="depth")

    return draw


def head_map(fractions: np.ndarray) -> DrawFn:
    """Returns a function that draws attended fractions [samples, L, K], mean over samples."""
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
