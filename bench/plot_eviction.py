"""How do error, logsumexp, memory and temperatures move under eviction?

It draws a report of bench.eviction_error, beside the report or in another folder:

    error.png          relative error of attention's output by layer, with and without merging
    drift.png          drift of the logsumexp over steps, with and without merging
    kept.png           slots by layer and KV head after the prompt, and all heads' in order
    memory.png         slots over steps, and steps until a compression is worth it
    temperatures.png   temperatures over compressions, each solved anew

    python -m bench.plot_eviction build/eviction_error.json

Needs matplotlib.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS, PANEL = 3, (4.4, 3.4)
Panels = dict[str, Callable[[Any], Any]]
RowDict = dict[str, Any]


def main() -> None:
    """Draws the figures of the report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot_eviction", description="Draw bench.eviction_error's report."
    )
    parser.add_argument("json", type=Path, help="report of bench.eviction_error")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: the report's)")
    args = parser.parse_args()
    report = json.loads(args.json.read_text())
    folder = args.json.parent if args.out is None else args.out
    folder.mkdir(parents=True, exist_ok=True)
    for name, panels in FIGURES.items():
        if drawn := panels(report):
            save(folder / name, heading(report), drawn)


def options(row: RowDict) -> dict[str, str]:
    """Returns the metric, the budget rule and whether slots are merged, as the policy has them."""
    return dict(re.findall(r"(metric|budgets|merge)='?(\w+)", row["policy"]))


def title(row: RowDict) -> str:
    """Returns the metric and the budget rule."""
    return "metric={metric}, budgets={budgets}".format(**options(row))


def is_merged(row: RowDict) -> bool:
    """Tells whether the policy merges."""
    return options(row)["merge"] == "True"


def pairs(report: dict[str, Any]) -> dict[str, list[RowDict]]:
    """Returns the rows of each metric and budget rule."""
    found: dict[str, list[RowDict]] = {}
    for row in report["results"]:
        found.setdefault(title(row), []).append(row)
    return found


def of_pairs(
    report: dict[str, Any], labels: tuple[str, str], draw: Callable[[Any, RowDict, str, str], Any]
) -> Panels:
    """Returns a panel for each pair, in which `draw` draws each row with a label and a colour."""

    def panel(rows: list[RowDict]) -> Callable[[Any], Any]:
        def drawn(axis: Any) -> None:
            for row in rows:
                merged = is_merged(row)
                draw(axis, row, "merged" if merged else "dropped", "C0" if merged else "C3")
            axis.set(xlabel=labels[0], ylabel=labels[1])
            axis.legend(fontsize=7)

        return drawn

    return {name: panel(rows) for name, rows in pairs(report).items()}


def error(report: dict[str, Any]) -> Panels:
    """Draws the mean over a layer's heads, and all heads as dots."""

    def draw(axis: Any, row: RowDict, label: str, color: str) -> None:
        heads = np.array(row["error_by_head"])
        axis.plot(heads.mean(1), color=color, label=f"{label}, mean {row['error']:.3f}")
        for head in heads.T:
            axis.plot(head, ".", color=color, markersize=2, alpha=0.5)

    return of_pairs(report, ("layer", "relative error of the output"), draw)


def steps(report: dict[str, Any]) -> np.ndarray:
    """Returns the steps in the middle of the blocks that the report has means of."""
    count, each = report["settings"]["steps"], report["settings"]["steps_per_mean"]
    return np.arange(0, count, each) + (each + 1) / 2


def drift(report: dict[str, Any]) -> Panels:
    """Draws the mean difference and the mean absolute one."""

    def draw(axis: Any, row: RowDict, label: str, color: str) -> None:
        at = steps(report)
        axis.plot(at, row["drift_by_step"], color=color, label=label)
        absolute = row["absolute_drift_by_step"]
        axis.plot(at, absolute, color=color, linestyle=":", label=f"{label}, absolute")

    return of_pairs(report, ("step", "logsumexp less the exact one, nats"), draw)


def kept(report: dict[str, Any]) -> Panels:
    """Draws the policies that merge; merging hardly changes which slots stay."""

    def heads(row: RowDict) -> Callable[[Any], Any]:
        def drawn(axis: Any) -> None:
            image = axis.imshow(row["kept_by_head"][0], aspect="auto", interpolation="none")
            axis.figure.colorbar(image, ax=axis)
            axis.set(xlabel="KV head", ylabel="layer")
            _whole(axis.xaxis)

        return drawn

    def in_order(axis: Any) -> None:
        for row in merged:
            axis.plot(np.sort(np.ravel(row["kept_by_head"][0]))[::-1], label=title(row))
        axis.set(xlabel="heads, fullest first", ylabel="slots")
        axis.legend(fontsize=6)

    merged = [row for row in report["results"] if is_merged(row)]
    return {title(row): heads(row) for row in merged} | {"all heads, in order": in_order}


def memory(report: dict[str, Any]) -> Panels:
    """Draws a head's slots on average, next to dense attention, and the steps to catch up."""
    merged = [row for row in report["results"] if is_merged(row)]
    prompt = report["settings"]["prompt"]

    def slots(axis: Any) -> None:
        for row in merged:
            axis.plot(steps(report), row["slots_by_step"], label=title(row))
        axis.plot(steps(report), prompt + steps(report), color="black", label="dense")
        axis.set(xlabel="step", ylabel="slots per head")
        axis.set_yscale("log", base=2)
        axis.legend(fontsize=6)

    def catch_up(axis: Any) -> None:
        for row in merged:
            axis.plot(row["catch_up"], "o-", markersize=3, label=title(row))
        axis.set(xlabel="compression", ylabel="steps until it is worth it")
        axis.set_ylim(bottom=0)
        _whole(axis.xaxis)

    return {"memory": slots, "bytes moved over bytes saved per step": catch_up}


def temperatures(report: dict[str, Any]) -> Panels:
    """Draws every head of the policies that calibrate and merge; none where none does."""

    def of_heads(row: RowDict) -> Callable[[Any], Any]:
        def drawn(axis: Any) -> None:
            solved = np.array(row["temperatures_by_head"])
            axis.plot(solved.reshape(len(solved), -1), color="C0", linewidth=0.6, alpha=0.5)
            axis.plot(np.median(solved, axis=(1, 2)), color="black", label="median")
            axis.set(xlabel="compression", ylabel="temperature")
            axis.set_yscale("log")
            axis.legend(fontsize=7)
            _whole(axis.xaxis)

        return drawn

    return {
        title(row): of_heads(row)
        for row in report["results"]
        if is_merged(row) and "temperatures_by_head" in row
    }


def _whole(axis: Any) -> None:
    """Marks whole numbers only."""
    axis.get_major_locator().set_params(integer=True)


FIGURES: dict[str, Callable[[dict[str, Any]], Panels]] = {
    "error.png": error,
    "drift.png": drift,
    "kept.png": kept,
    "memory.png": memory,
    "temperatures.png": temperatures,
}


def heading(report: dict[str, Any]) -> str:
    """Says what was run where."""
    settings, environment = report["settings"], report["environment"]
    device = ", ".join(gpu["name"] for gpu in environment["gpus"]) or "CPU"
    revision = (environment["git_revision"] or "unknown")[:10]
    return (
        f"SmolLM2-135M, {settings['dtype']}, {device}, {settings['prompts']} × "
        f"{settings['prompt']} tokens, revision {revision}"
    )


def save(path: Path, text: str, panels: Panels) -> None:
    """Draws equally large panels by title."""
    from matplotlib.figure import Figure

    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure((PANEL[0] * columns, PANEL[1] * rows + 0.5), layout="constrained")
    axes: Sequence[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, draw) in zip(axes, panels.items(), strict=False):
        draw(axis)
        axis.set_title(name, fontsize=9)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    figure.suptitle(text, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
