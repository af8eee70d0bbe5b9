"""How much faster than dense attention is each policy on one model, and how close to it?

This runs `jsparse recommend` and records the result, so each row has the speed and the quality of
one setting, on one model and one device. Steps are timed on a cache of random keys; the KL
divergence and the agreement of the most likely next token are those along real text.

    python -m bench.recommend --model model.gguf --context 30720 --batch 16 --json build/real.json
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report

DENSE = "dense()"
LONG = 30  # characters of a label


def measured(options: Namespace) -> dict[str, Any]:
    """Returns the report of a run."""
    import jsparse
    from jsparse.benchmark.recommend import recommend
    from jsparse.benchmark.requirements import Requirements, candidates

    environment = describe(allow_modified=options.allow_modified)
    params = jsparse.load(options.model)
    policies = options.policy or candidates(options.context)
    wanted = Requirements(
        Path(options.model).stem,
        options.context,
        options.batch,
        tuple(policies),
        samples=options.samples,
    )
    found = recommend(params, wanted, report=lambda *part: print(*part, flush=True), notify=print)
    return {"environment": environment, **found}


def draw(report: dict[str, Any], path: Path) -> None:
    """Plots the KL divergence over the speed-up, one labelled point per policy."""
    from matplotlib import pyplot, rc_context

    points = sorted(
        (row["kl"], row["over_dense"], row["policy"])
        for row in report["rows"]
        if row["policy"] != DENSE and row["kl"] is not None
    )
    middle = max(speed for _, speed, _ in points) / 2 + 0.5
    with rc_context({"font.size": 11, "svg.hashsalt": "jsparse"}):
        figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        above = float("inf")
        for kl, speed, policy in reversed(points):
            axis.plot(speed, kl, "o", color="tab:blue")
            left, below = speed > (1 if len(policy) > LONG else 1.2) * middle, above < 1.15 * kl
            axis.annotate(
                policy,
                (speed, kl),
                textcoords="offset points",
                xytext=(-7 if left else 7, -14 if below else 4),
                ha="right" if left else "left",
            )
            above = kl
        axis.axvline(1, color="gray", linewidth=1)
        axis.set(
            xlabel="speed of a decode step, times dense attention",
            ylabel="KL from dense attention (nats)",
            yscale="log",
        )
        axis.margins(x=0.25, y=0.12)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def main() -> None:
    """Measures, or draws an earlier report."""
    parser = report_parser("recommend", str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="as `jsparse recommend` takes it")
    parser.add_argument("--context", type=int, default=30720, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences that decode together")
    parser.add_argument("--samples", type=int, default=8, help="texts per policy")
    parser.add_argument("--policy", action="append", help="repeatable; default: the usual ones")
    parser.add_argument("--draw", type=Path, metavar="REPORT", help="only plot this report")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.draw.with_suffix(".png"))
        return
    report = measured(options)
    write_report(options.json, report)
    for row in report["rows"]:
        kl = "" if row["kl"] is None else f"{row['kl']:.4f}"
        print(f"{row['policy']:60} {row['ms']:8.3f} {row['over_dense']:6.2f} {kl:>8}")


if __name__ == "__main__":
    main()
