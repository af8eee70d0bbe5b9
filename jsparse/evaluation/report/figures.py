"""Draws a panel as an SVG."""

import io
import textwrap
from collections.abc import Callable
from typing import Any

PANEL = (4.0, 4.6)  # inches, with the legend
# black parts of an SVG are light on a dark page
INK = (
    "<style>:root { --ink: #1c1d1f } text { fill: var(--ink) } "
    "@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e3 } }</style>"
)
DrawFn = Callable[[Any], Any]


def svg(title: str, draw: DrawFn) -> str:
    """Returns a panel as an SVG without a background; black follows the page's theme."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(PANEL, layout="constrained")
    axis = figure.subplots()
    draw(axis)
    axis.set_title(textwrap.fill(title, 40), fontsize=9)
    lines, labels = axis.get_legend_handles_labels()
    if labels:
        small = 5 if max(map(len, labels)) > 40 else None
        figure.legend(
            lines, labels, loc="outside lower center", ncols=2, fontsize=small, frameon=False
        )
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jsparse"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue().replace("#000000", "var(--ink)")
    begin = text.index(">", text.index("<svg")) + 1
    return text[text.index("<svg") : begin] + INK + text[begin:]
