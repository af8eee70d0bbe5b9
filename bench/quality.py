"""What do the policies cost in quality, on SmolLM2? The set of runs behind the README's table.

`jsparse eval` with policies, tasks and lengths chosen here: dense, StreamingLLM, and the oracles, which say what a
perfect selector of so many tokens, or of so much attention mass, would keep.

    python -m bench.quality --json bench/results/quality.json [--resume] [--lengths 1024 2048] [--samples 100]
"""

import argparse
from pathlib import Path

import jax

from bench.environment import describe
from jsparse.evaluation.command import carry_out, draw, show
from jsparse.evaluation.runner import plan

POLICIES = (
    *(f"streaming(sink=4, recent={recent})" for recent in (124, 252, 508, 1020)),
    *(f"oracle_top_k(budget={budget})" for budget in (128, 256, 512, 1024, 2048)),
    *(f"oracle_top_p(p={p})" for p in (0.8, 0.9, 0.95, 0.99)),
)
TASKS = ("kl", "ppl", "passkey", "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
LENGTHS = (1024, 2048, 4096, 8192)


def main() -> None:
    """Measures, prints the tables, draws the plots beside the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description="Measure the policies' quality.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    wanted = plan(args.policy, args.tasks, args.lengths, args.samples, batch=args.batch)
    environment = {"device": jax.local_devices()[0].device_kind, **describe()}
    report = carry_out(wanted, args.model, args.json, environment, resume=args.resume)
    show(report)
    draw(report, args.json.parent / args.json.stem)


if __name__ == "__main__":
    main()
