"""Do adjacent layers attend to the same tokens, head by head, and which layer should pick again?

SmolLM2 reads windows of the text of `jsparse eval`; dense attention's weights in the step that
follows a window are means over the group of query heads.

    overlap     share of a head's heaviest tokens that are also the heaviest of the head of the same
                index in the next layer: LycheeDecode (arXiv:2602.04541), Figures 2 and 11 to 14
    covered     share of the weight that TidalDecode's tokens hold, mean over all layers and heads
                (dense layers hold all of it), by the layer that picks again: the way in which
                arXiv:2410.05076 chooses that layer for a model, by weight instead of by needles.
                Tokens are ranked by these weights, not by those of the group's mean query

    python -m bench.layer_overlap --json build/layer_overlap.json
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from jsparse.evaluation.inspection import Inspection, inspect_step
from jsparse.models.checkpoint import load

LENGTH, PROMPTS = 2048, 8
COUNTS = (16, 64, 256)  # heaviest tokens whose overlap is told
BUDGET, FIRST, SINK, RECENT = 512, 2, 4, 64  # of `tidal`


def covered(weights: Float[np.ndarray, "L K T"], budget: int, first: int) -> Float[np.ndarray, "L"]:
    """Returns, by the layer that picks again, the share of the weight that TidalDecode covers.

    Entry `first` is of picking once; those before it are NaN.
    """
    layers = len(weights)
    # [picking layer, layer]: what the tokens that one layer picks hold in another
    held = np.stack(
        [weights[:, :, picked(layer.mean(0), budget)].sum(-1).mean(-1) for layer in weights]
    )
    shares, nth = np.full(layers, np.nan), np.arange(layers)
    for again in range(first, layers):
        by_layer = np.where(nth > again, held[again], held[first])
        shares[again] = np.where((nth <= first) | (nth == again), 1.0, by_layer).mean()
    return shares


def picked(weights: Float[np.ndarray, "T"], budget: int) -> Bool[np.ndarray, "T"]:
    """Marks the tokens that `tidal` would pick by these weights, sinks and recent ones first."""
    nth = np.arange(len(weights))
    always = (nth < SINK) | (nth >= len(weights) - RECENT)
    order = np.argsort(np.where(always, -np.inf, -weights), kind="stable")
    marks = np.zeros(len(weights), np.bool_)
    marks[order[:budget]] = True
    return marks


def results(steps: Sequence[Inspection], budget: int) -> dict[str, Any]:
    """Returns the means over steps, in the form of the report."""
    overlaps = {count: np.mean([step.overlap(count) for step in steps], axis=0) for count in COUNTS}
    shares = np.mean([covered(step.weights, budget, FIRST) for step in steps], axis=0)
    return {
        "overlap": [
            {
                "heaviest": count,
                "mean": float(of.mean()),
                "least": float(of.min()),
                "most": float(of.max()),
                "by_layer_and_head": of.tolist(),
            }
            for count, of in overlaps.items()
        ],
        "covered": [
            {"again": again, "covered": float(shares[again])} for again in range(FIRST, len(shares))
        ],
    }


def tables_of(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of overlaps and that of the layers that pick again, best first."""
    near = Table("heaviest tokens", "mean overlap", "least of a head", "most of a head")
    for row in found["overlap"]:
        near.add_row(str(row["heaviest"]), *(f"{row[x]:.1%}" for x in ("mean", "least", "most")))
    again = Table("picks again", "weight covered")
    for row in sorted(found["covered"], key=lambda row: -row["covered"]):
        name = "never" if row["again"] == FIRST else f"layer {row['again']}"
        again.add_row(name, f"{row['covered']:.2%}")
    return [near, again]


def main() -> None:
    """Measures all windows and prints two tables."""
    parser = report_parser("layer_overlap", "Measure what tokens adjacent layers share.")
    parser.add_argument(
        "--length", type=int, default=LENGTH, help=f"tokens per window (default {LENGTH})"
    )
    parser.add_argument(
        "--prompts", type=int, default=PROMPTS, help=f"number of windows (default {PROMPTS})"
    )
    parser.add_argument(
        "--budget", type=int, default=BUDGET, help=f"tokens that are picked (default {BUDGET})"
    )
    args = parser.parse_args()
    min_length = max(*COUNTS, args.budget)
    if args.prompts < 1 or args.budget <= SINK + RECENT or args.length < min_length:
        parser.error(
            f"--length {args.length}: must be at least {min_length}; --prompts at least 1 and "
            f"--budget above {SINK + RECENT}"
        )
    environment, params = describe(allow_modified=args.allow_modified), load("smollm2")
    tokens = text_tokens(params)
    if args.prompts * args.length > len(tokens):
        parser.error(f"--prompts {args.prompts}: the text has {len(tokens)} tokens")
    starts = range(0, args.prompts * args.length, args.length)
    steps = [inspect_step(params, "dense", tokens[start : start + args.length]) for start in starts]
    settings = vars(args) | {"json": None, "dtype": str(params.dtype), "first": FIRST}
    report = {"benchmark": "layer_overlap", "environment": environment, "settings": settings}
    found = results(steps, args.budget)
    write_report(args.json, report | {"results": found})
    for table in tables_of(found):
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
