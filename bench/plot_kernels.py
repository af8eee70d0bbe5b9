"""Draws what bench.kernels --grid measured, from its JSON alone: time over context, speed-up over what is attended.

    python -m bench.plot_kernels bench/results/kernels.json --out bench/results

Writes kernels_time.png and kernels_speedup.png; needs matplotlib.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.kernel_table import peer_us

PEERS = {"torch FA2": "--", "torch cuDNN": ":"}
KIB, COLUMNS = 1024, 3


def main() -> None:
    """Draws both."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot_kernels", description="Draw bench.kernels' grid.")
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder")
    args = parser.parse_args()
    report = json.loads(args.json.read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("time", draw_time), ("speedup", draw_speedup)):
        path = args.out / f"kernels_{name}.png"
        panels(report, draw, path)
        print(path)


def panels(report: dict[str, Any], draw: Callable[[Any, list[dict], dict], None], path: Path) -> None:
    """A panel for each batch and number of heads, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in report["grid"] if "us" in row]
    shapes = sorted({(row["heads"], row["batch"]) for row in measured})
    if not shapes:
        raise SystemExit("the report holds no grid: run bench.kernels --grid")
    rows = -(-(len(shapes) + 1) // COLUMNS)  # one place is the legend's
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 3.6 * rows), sharey=True, squeeze=False)
    for axis, (heads, batch) in zip(axes.flat, shapes, strict=False):
        draw(axis, [row for row in measured if (row["heads"], row["batch"]) == (heads, batch)], report)
        axis.set_title(f"batch {batch}, {heads} query / 8 KV heads", fontsize=10)
        axis.grid(alpha=0.3)
        axis.xaxis.minorticks_off()
        axis.tick_params(labelleft=True)
    for axis in axes.flat[len(shapes) :]:
        axis.axis("off")
    axes.flat[len(shapes)].legend(*axes.flat[0].get_legend_handles_labels(), loc="center")
    versions = ", ".join(f"{name} {value}" for name, value in report["environment"]["versions"].items())
    revision = report["environment"]["git_revision"]
    revision = f"revision {revision[:10]}" if revision else "revision unknown"
    figure.suptitle(f"{report['device']}, {report['timestamp'][:10]}, {revision} ({versions})", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_time(axis: Any, rows: list[dict], report: dict) -> None:
    """Microseconds of one call over the context, a line for each fraction."""
    for fraction in sorted({round(row["fraction"], 2) for row in rows}, reverse=True):
        line = sorted((row["context"], row["us"]["median"]) for row in rows if round(row["fraction"], 2) == fraction)
        axis.loglog(*zip(*line, strict=True), marker="o", label="dense" if fraction == 1 else f"{fraction:.0%}")
    for peer, style in PEERS.items():
        found = {row["context"]: peer_us(row, report["peers"], peer) for row in rows}
        line = sorted((context, us) for context, us in found.items() if us is not None)
        if line:
            axis.loglog(*zip(*line, strict=True), style, color="black", label=f"{peer}, dense")
    _contexts(axis, rows)
    axis.set(xlabel="tokens of context", ylabel="µs a call")


def draw_speedup(axis: Any, rows: list[dict], report: dict) -> None:
    """How many times faster than PyTorch's FlashAttention-2 over the whole context, a line for each context."""
    for context in sorted({row["context"] for row in rows}):
        same = sorted((row for row in rows if row["context"] == context), key=lambda row: row["fraction"])
        dense = peer_us(same[0], report["peers"], "torch FA2")
        if dense is not None:
            fractions = [row["fraction"] for row in same]
            axis.loglog(fractions, [dense / row["us"]["median"] for row in same], marker="o", label=_tokens(context))
    axis.axhline(1, color="black", linewidth=0.8)
    ticks = sorted({round(row["fraction"], 2) for row in rows})
    axis.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="attended", ylabel="speed-up over torch FA2, dense")


def _contexts(axis: Any, rows: list[dict]) -> None:
    ticks = sorted({row["context"] for row in rows})
    axis.set_xticks(ticks, [_tokens(tick) for tick in ticks])


def _tokens(context: int) -> str:
    return f"{context // KIB}K" if context >= KIB else str(context)


if __name__ == "__main__":
    main()
