"""How do the kernels scale with context, sparsity and the number of sparse heads?

It draws the grids of a report of bench.kernels, beside the report or in another folder:

    time.png       time over context (--grid)
    speedup.png    speed-up over the attended fraction (--grid)
    REPORT.png     speed-up over context by the number of sparse heads (--hybrid), where the report
                   is REPORT.json

    python -m bench.plot_kernels build/kernels.json

Needs matplotlib.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.lib.kernel_cases import KV_HEADS
from bench.lib.kernel_table import peer_us

PEERS = {"torch FA2": "--", "torch cuDNN": ":"}
KIB, COLUMNS = 1024, 3
GRID_TITLE = "batch {batch}, {heads} query / 8 KV heads"


class Figure(NamedTuple):
    """A figure with panels of a grid's rows.

    Attributes:
        file: its name, where {report} is the report's.
        grid: the grid in the report.
        by: the keys that order the rows.
        title: the format of a panel's title; rows of one title share a panel.
        draw: draws a panel, given axis, rows and report.
    """

    file: str
    grid: str
    by: tuple[str, ...]
    title: str
    draw: Callable[[Any, list[dict], dict], None]


def main() -> None:
    """Draws the grids of the report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot_kernels", description="Draw bench.kernels' grids."
    )
    parser.add_argument("json", type=Path, help="report of bench.kernels")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: the report's)")
    args = parser.parse_args()
    report = json.loads(args.json.read_text())
    folder = args.json.parent if args.out is None else args.out
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [figure for figure in FIGURES if measured(report, figure)]
    if not drawn:
        raise SystemExit(f"error: {args.json} has no grid: run bench.kernels --grid or --hybrid")
    for figure in drawn:
        path = folder / figure.file.format(report=args.json.stem)
        panels(report, figure, path)
        print(path)


def measured(report: dict[str, Any], figure: Figure) -> list[dict[str, Any]]:
    """Returns the rows that have times, in the order of the panels; a report may lack the grid."""
    rows = [row for row in report.get(figure.grid, ()) if "us" in row]
    return sorted(rows, key=lambda row: [row[key] for key in figure.by])


def panels(report: dict[str, Any], figure: Figure, path: Path) -> None:
    """Draws the panels of a figure side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts: dict[str, list[dict[str, Any]]] = {}
    for row in measured(report, figure):
        parts.setdefault(figure.title.format_map(row), []).append(row)
    lines = -(-(len(parts) + 1) // COLUMNS)  # one place is for the legend
    canvas, axes = pyplot.subplots(
        lines, COLUMNS, figsize=(4 * COLUMNS, 3.6 * lines), sharey=True, squeeze=False
    )
    for axis, (title, rows) in zip(axes.flat, parts.items(), strict=False):
        figure.draw(axis, rows, report)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.xaxis.minorticks_off()
        axis.tick_params(labelleft=True)
    for axis in axes.flat[len(parts) :]:
        axis.axis("off")
    axes.flat[len(parts)].legend(*axes.flat[0].get_legend_handles_labels(), loc="center")
    versions = ", ".join(
        f"{name} {value}" for name, value in report["environment"]["versions"].items()
    )
    revision = report["environment"]["git_revision"]
    revision = f"revision {revision[:10]}" if revision else "revision unknown"
    canvas.suptitle(
        f"{report['device']}, {report['timestamp'][:10]}, {revision} ({versions})", fontsize=8
    )
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)


def draw_time(axis: Any, rows: list[dict], report: dict) -> None:
    """Draws microseconds per call over the context, a line for each fraction."""
    for fraction in sorted({round(row["fraction"], 2) for row in rows}, reverse=True):
        line = sorted(
            (row["context"], row["us"]["median"])
            for row in rows
            if round(row["fraction"], 2) == fraction
        )
        axis.loglog(
            *zip(*line, strict=True),
            marker="o",
            label="dense" if fraction == 1 else f"{fraction:.0%}",
        )
    for peer, style in PEERS.items():
        found = {row["context"]: peer_us(row, report["peers"], peer) for row in rows}
        line = sorted((context, us) for context, us in found.items() if us is not None)
        if line:
            axis.loglog(*zip(*line, strict=True), style, color="black", label=f"{peer}, dense")
    _contexts(axis, rows)
    axis.set(xlabel="tokens of context", ylabel="µs per call")


def draw_speedup(axis: Any, rows: list[dict], report: dict) -> None:
    """Draws the speed-up over PyTorch's dense FlashAttention-2 by the attended fraction.

    Each context is a line.
    """
    for context in sorted({row["context"] for row in rows}):
        same = sorted(
            (row for row in rows if row["context"] == context), key=lambda row: row["fraction"]
        )
        dense = peer_us(same[0], report["peers"], "torch FA2")
        if dense is not None:
            fractions = [row["fraction"] for row in same]
            axis.loglog(
                fractions,
                [dense / row["us"]["median"] for row in same],
                marker="o",
                label=_tokens(context),
            )
    axis.axhline(1, color="black", linewidth=0.8)
    ticks = sorted({round(row["fraction"], 2) for row in rows})
    axis.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="attended", ylabel="speed-up over torch FA2, dense")


def draw_hybrid(axis: Any, rows: list[dict], report: dict) -> None:
    """Draws the speed-up over PyTorch's FlashAttention-2 by the context.

    Each number of sparse heads is a line. A dotted line in the same colour is the bound that a call
    would reach if it took no longer than its bytes.
    """
    timed = [
        (row, us) for row in rows if (us := peer_us(row, report["peers"], "torch FA2")) is not None
    ]
    for sparse in sorted({row["sparse_heads"] for row, _ in timed}):
        same = sorted(
            (row["context"], us / row["us"]["median"], us / row["floor_us"])
            for row, us in timed
            if row["sparse_heads"] == sparse
        )
        contexts, reached, bounds = zip(*same, strict=True)
        label = f"{sparse} of {KV_HEADS} KV heads sparse" if sparse else "dense"
        (line,) = axis.loglog(contexts, reached, marker="o", label=label)
        axis.loglog(contexts, bounds, ":", color=line.get_color())
    cudnn = {
        row["context"]: us / other
        for row, us in timed
        if (other := peer_us(row, report["peers"], "torch cuDNN"))
    }
    axis.loglog(list(cudnn), list(cudnn.values()), "--", color="black", label="torch cuDNN, dense")
    axis.loglog([], [], ":", color="black", label="bytes alone")
    axis.axhline(1, color="black", linewidth=0.8)
    _contexts(axis, rows)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="tokens of context", ylabel="speed-up over torch FA2, dense")


def _contexts(axis: Any, rows: list[dict]) -> None:
    ticks = sorted({row["context"] for row in rows})
    axis.set_xticks(ticks, [_tokens(tick) for tick in ticks])


def _tokens(context: int) -> str:
    return f"{context // KIB}K" if context >= KIB else str(context)


FIGURES = (
    Figure("time.png", "grid", ("heads", "batch"), GRID_TITLE, draw_time),
    Figure("speedup.png", "grid", ("heads", "batch"), GRID_TITLE, draw_speedup),
    Figure("{report}.png", "hybrid", ("case",), "sparse heads: {case}", draw_hybrid),
)


if __name__ == "__main__":
    main()
