"""Formats the report of bench.kernels as a table with lines of at most 150 characters."""

from collections.abc import Callable, Iterator
from typing import Any

PEER_COLUMNS = ("torch FA2", "torch cuDNN", "FlashInfer CUDA", "FlashInfer tensor")
SHAPE = ("heads", "batch", "context")
SHOWN_BATCHES = (1, 8)  # of the grids; the report has all


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each contender of each case, then one for each shape of the grids."""
    rate = report["bandwidth"]
    yield (
        f"read {rate['memory'] / 1e12:.2f} TB/s, bus {rate['bus'] / 1e9:.0f} GB/s; "
        "us per call, + is a kernel launch"
    )
    yield (
        f"{'case':32}{'contender':20}{'us':>8}{'kernels':>12}{'wall':>8}{'floor':>8}{'x':>7}"
        + "".join(
            f"{name.replace('FlashInfer', 'FI').replace('torch ', ''):>10}" for name in PEER_COLUMNS
        )
    )
    for row in report["results"]:
        yield _line(row, report["peers"])
    yield from _grid(report, "grid", lambda row: f"{row['fraction']:.0%}")
    yield from _grid(report, "hybrid", lambda row: f"{row['sparse_heads']} sparse")
    for peer in report["peers"]:
        if "error" in peer:
            where = peer.get("case") or f"{peer['heads']} heads b{peer['batch']} {peer['context']}"
            yield f"{where:32}{peer['contender']:20}{peer['error']}"[:150]


def peer_us(row: dict[str, Any], peers: list[dict[str, Any]], contender: str) -> float | None:
    """Returns a peer's time for the row's case, or None if it has none.

    PyTorch's time is that of dense attention for the row's shape.
    """
    for peer in peers:
        if peer["contender"] == contender and "us" in peer:
            keys = ("case",) if "case" in peer else SHAPE
            if all(peer[key] == row.get(key) for key in keys):
                return peer["us"]["median"]
    return None


def _line(row: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    text = f"{row['case'][:31]:32}{row['contender'][:19]:20}"
    failure = row.get("refused") or row.get("error")
    if failure:
        return f"{text}{'refused: ' if 'refused' in row else ''}{failure}".replace("\n", " ")[:150]
    kernels = f"{row['kernels']['median']:.1f}+{row['launches']}" if "kernels" in row else "-"
    text += (
        f"{row['us']['median']:8.1f}{kernels:>12}{row['wall']['median']:8.1f}{row['floor_us']:8.1f}"
    )
    text += f"{row['over_floor']:7.2f}" + "".join(
        f"{_or_dash(peer_us(row, peers, c)):>10}" for c in PEER_COLUMNS
    )
    return text + ("  " + row["profile_error"][:20] if "profile_error" in row else "")


def _grid(
    report: dict[str, Any], name: str, column: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in report[name]:
        if row["batch"] in SHOWN_BATCHES:
            shapes.setdefault(f"{row['context']}, {row['case']}", []).append(row)
    for nth, (shape, rows) in enumerate(shapes.items()):
        if nth == 0:
            heading = "".join(f"{column(row):>17}" for row in rows)
            yield f"{f'{name}, us/floor (x over FA2)':30}{heading}{'FA2':>9}{'cuDNN':>9}"
        dense, cudnn = (
            peer_us(rows[0], report["peers"], contender)
            for contender in ("torch FA2", "torch cuDNN")
        )
        cells = "".join(f"{_cell(row, dense):>17}" for row in rows)
        yield f"{shape:30}{cells}{_or_dash(dense):>9}{_or_dash(cudnn):>9}"


def _cell(row: dict[str, Any], dense: float | None) -> str:
    us = row["us"]["median"] if "us" in row else None
    faster = f" ({dense / us:.1f}x)" if us and dense else ""
    return f"{_or_dash(us)}/{row['floor_us']:.0f}{faster}"


def _or_dash(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"
