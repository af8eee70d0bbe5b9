"""How many tokens does a round give, by method and number of drafts? Draws bench.acceptance.

The first report is greedy, the second drawn. On the left a line per method goes through the mean
tokens of a round, over all texts, against the number of drafts; on the right stands the share of
drafts that were accepted where tokens are drawn, with a mark per text.

    python -m bench.plot_acceptance greedy.json drawn.json --out docs/images/acceptance.png

Needs matplotlib.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Report = dict[str, Any]
MARKS = ("o", "s", "^")


def main() -> None:
    """Draws the figure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot_acceptance", description="Draw how many drafts are accepted."
    )
    parser.add_argument("greedy", type=Path, help="a report of bench.acceptance")
    parser.add_argument("drawn", type=Path, help="another, with a temperature above 0")
    parser.add_argument("--out", type=Path, required=True, help="the figure")
    args = parser.parse_args()
    reports = (json.loads(file.read_text("utf-8")) for file in (args.greedy, args.drawn))
    draw(*reports, args.out)


def lines(report: Report) -> dict[str, list[tuple[int, float]]]:
    """Returns for each method the mean tokens of a round, by number of drafts."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in report["results"]:
        if "texts" in row:
            mean = statistics.mean(of["tokens_per_round"] for of in row["texts"].values())
            found.setdefault(row["policy"], []).append((row["drafts"], mean))
    return {policy: sorted(points) for policy, points in found.items()}


def shares(report: Report) -> dict[str, dict[str, float]]:
    """Returns for each method the share of drafts that were accepted, by text, in percent."""
    return {
        row["policy"]: {name: 100 * of["accepted_share"] for name, of in row["texts"].items()}
        for row in report["results"]
        if "texts" in row
    }


def draw(greedy: Report, drawn: Report, file: Path) -> None:
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
    left.legend(fontsize=7)
    of_texts = shares(drawn)
    places = range(len(of_texts))
    for mark, name in zip(MARKS, next(iter(of_texts.values())), strict=False):
        values = [own[name] for own in of_texts.values()]
        right.plot(values, places, mark, markersize=6, linestyle="none", label=name)
    right.set_yticks(list(places), list(of_texts), fontsize=7)
    right.invert_yaxis()
    right.set_xlim(0, 100)
    right.set_xlabel(f"accepted drafts, %, drawn at temperature {drawn['temperature']:g}")
    right.legend(fontsize=7)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    main()
