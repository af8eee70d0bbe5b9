"""Draws docs/images/*.svg from the text files beside this script: `python docs/figures/draw.py`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
IMAGES = HERE.parent / "images"
BOX_HEIGHT = 48
# a background of its own, so that the figure reads the same on light and on dark pages
STYLE = """
    .back { fill: #ffffff; stroke: #b8c4c4 }
    .band { fill: #f1f5f5; stroke: none }
    .box { fill: #ffffff; stroke: #455a64; stroke-width: 1.2 }
    .policy, .read { fill: #b2dfdb; stroke: #00695c; stroke-width: 1.2 }
    .page { fill: #ffffff; stroke: #90a4ae }
    .new { fill: #00897b; stroke: #00695c }
    .arrow { fill: none; stroke: #455a64; stroke-width: 1.4; marker-end: url(#head) }
    .dashed { stroke-dasharray: 5 4 }
    text { font: 13px sans-serif; fill: #263238 }
    .name { font-weight: bold }
    .label { font-size: 12px; fill: #455a64 }
"""
PAGE_CLASSES = {".": "page", "#": "read", "+": "new"}


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """Returns a line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    """Returns a rectangle with round corners."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="4" class="{style}"/>'


def band(entry: Mapping[str, Any], width: float) -> list[str]:
    """Returns a strip across the figure and its name."""
    strip = rectangle(12, entry["y"], width - 24, entry["height"], "band")
    name = text(width - 24, entry["y"] + entry["height"] - 10, entry["label"], "label", "end")
    return [strip, name]


def box(entry: Mapping[str, Any]) -> list[str]:
    """Returns a box with a name and what it does."""
    x, y, width = entry["x"], entry["y"], entry["width"]
    name, says = entry["lines"]
    middle = x + width / 2
    return [
        rectangle(x, y, width, BOX_HEIGHT, entry.get("kind", "box")),
        text(middle, y + 20, name, "name", "middle"),
        text(middle, y + 37, says, "label", "middle"),
    ]


def pages(entry: Mapping[str, Any]) -> list[str]:
    """Returns a row of pages, and below it what their colours mean."""
    x, y, cell = entry["x"], entry["y"], entry["cell"]
    row = [
        rectangle(x + nth * cell, y, cell - 4, cell, PAGE_CLASSES[mark])
        for nth, mark in enumerate(entry["text"])
    ]
    return [*row, text(x, y + cell + 32, entry["note"], "label")]


def arrow(entry: Mapping[str, Any]) -> list[str]:
    """Returns an arrow through points, with its label beside the first stretch or at `label_at`."""
    (x0, y0), (x1, y1) = entry["points"][:2]
    path = " ".join(f"{x},{y}" for x, y in entry["points"])
    style = "arrow dashed" if entry.get("dashed") else "arrow"
    line = f'<polyline points="{path}" class="{style}"/>'
    x, y = ((x0 + x1) / 2, y0 - 6) if y0 == y1 else (x0 + 6, (y0 + y1) / 2 + 4)
    x, y = entry.get("label_at", (x, y))
    return [line, text(x, y, entry["label"], "label")] if "label" in entry else [line]


def draw(source: str) -> str:
    """Returns the figure that a text describes, as SVG."""
    figure = tomllib.loads(source)
    width, height = figure["width"], figure["height"]
    parts = [
        rectangle(1, 1, width - 2, height - 2, "back"),
        *(part for entry in figure["band"] for part in band(entry, width)),
        *pages(figure["pages"]),
        *(part for entry in figure["arrow"] for part in arrow(entry)),
        *(part for entry in figure["box"] for part in box(entry)),
    ]
    head = (
        '<marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path d="M0,0 L9,4 L0,8 z" fill="#455a64"/></marker>'
    )
    lines = "\n  ".join([f"<defs>{head}</defs>", *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"  <title>{escape(figure['title'])}</title>\n  <style>{STYLE}  </style>\n"
        f"  {lines}\n</svg>\n"
    )


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.toml")):
        (IMAGES / f"{path.stem}.svg").write_text(draw(path.read_text(encoding="utf-8")))
