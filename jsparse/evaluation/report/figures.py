"""Lays panels out as a figure in a file, or as an SVG each."""

import io
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsparse.machine.extras import install

COLUMNS, DPI = 4, 120
PANEL = (4.0, 3.6)  # inches
HEADING = 1.0  # inches for title and legend
# black parts of an SVG are light on a dark page
INK = (
    "<style>:root { --ink: #1c1d1f } text { fill: var(--ink) } "
    "@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e3 } }</style>"
)
DrawFn = Callable[[Any], Any]


def save_figure(
    report: Mapping[str, Any],
    panels: Mapping[str, DrawFn],
    path: Path | str,
    needed: str,
    columns: int = COLUMNS,
) -> None:
    """Draws equally large panels by title, under a heading with model, dtype and device."""
    if not panels:
        raise ValueError(f"nothing to draw for {path}: the result must hold {needed}")
    _figure_of(panels, columns, _heading(report)).savefig(path, dpi=DPI)


def svg(title: str, draw: DrawFn) -> str:
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
