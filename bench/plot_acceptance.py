"""How many tokens does a round give, by method and number of drafts? Draws bench.acceptance.

On the left a line per method goes through the mean tokens of a round, over all texts, against the
number of drafts; on the right stands the share of drafts that were accepted where tokens are drawn,
with a mark per text.

    python -m bench.plot_acceptance --greedy cpu.json --drawn drawn.json --out acceptance.png

Needs matplotlib.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Report = dict[str, Any]
MARKS = ("o", "s", "^")


def main() -> None:
    """Draws the figure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot_acceptance", description="Draw how many drafts are accepted."
    )
    for name in ("--greedy", "--drawn"):
        parser.add_argument(
            name, nargs="+", type=Path, required=True, help="reports of bench.acceptance"
        )
    parser.add_argument("--out", type=Path, required=True, help="the figure")
    args = parser.parse_args()
    greedy, drawn = (
        [json.loads(file.read_text("utf-8")) for file in files]
        for files in (args.greedy, args.drawn)
    )
    draw(greedy, drawn, args.out)


def entries(reports: Iterable[Report]) -> Iterator[tuple[str, int, str, dict[str, float]]]:
    """Yields method, number of drafts, text and what was found, for each of all reports.

    Older reports have a row for each text, which was decoded alone.
    """
    for report in reports:
        for row in report.get("results", []):
            for text, of in row.get("texts", {}).items():
                yield row["policy"], row["drafts"], text, of
        for row in report.get("rows", []):
            yield row["policy"], row["drafts"], row["text"], row


def lines(reports: Iterable[Report]) -> dict[str, list[tuple[int, float]]]:
    """Returns for each method the mean tokens of a round, by number of drafts."""
    found: dict[str, dict[int, list[float]]] = {}
    for policy, drafts, _, of in entries(reports):
        found.setdefault(policy, {}).setdefault(drafts, []).append(of["tokens_per_round"])
    return {
        policy: sorted((number, statistics.mean(each)) for number, each in by_number.items())
        for policy, by_number in found.items()
    }


def shares(reports: Iterable[Report]) -> dict[str, dict[str, float]]:
    """Returns for each method the share of drafts that were accepted, by text, in percent."""
    found: dict[str, dict[str, float]] = {}
    for policy, _, text, of in entries(reports):
        found.setdefault(policy, {})[text] = 100 * of["accepted_share"]
    return found


def draw(greedy: Sequence[Report], drawn: Sequence[Report], file: Path) -> None:
    """Draws both reports."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=100, facecolor="white")
    of_methods = lines(greedy)
    for policy, points in of_methods.items():
        left.plot(*zip(*points, strict=True), marker="o", markersize=4, label=policy)
    numbers = sorted({number for points in of_methods.values() for number, _ in points})
    left.plot(numbers, [number + 1 for number in numbers], "--", color="0.6", label="all accepted")
    left.set_xticks(numbers)
    left.set_xlabel("drafts in a round")
    left.set_ylabel("tokens of a round, greedy")
    left.legend(fontsize=7, loc="lower right")
    of_texts = shares(drawn)
    places = range(len(of_texts))
    for mark, name in zip(MARKS, next(iter(of_texts.values())), strict=False):
        values = [own[name] for own in of_texts.values()]
        right.plot(values, places, mark, markersize=6, linestyle="none", label=name)
    right.set_yticks(list(places), list(of_texts), fontsize=7)
    right.invert_yaxis()
    right.set_xlim(0, 100)
    right.set_xlabel(f"accepted drafts, %, drawn at temperature {drawn[0]['temperature']:g}")
    right.legend(fontsize=7)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    main()
