"""What do the policies cost in quality, on SmolLM2? The runs behind the README's table.

`jsparse eval` with policies, tasks and lengths chosen here. The set "yardsticks": dense, StreamingLLM, and the oracles,
which say what a perfect selector of so many tokens, or of so much attention mass, would keep. The set "twilight": base
selectors at several budgets, and Twilight over them, the first two layers dense as its paper has it.

Each length, and each group of policies, is a process of its own, some of them side by side, since much of the time goes
into compiling; they take the GPUs that there are in turn. Beside PATH lie their reports, with every sample. PATH holds
them all, without the samples.

    python -m bench.quality --json bench/results/quality.json [--resume] [--lengths 1024 2048] [--groups 2]
                            [--processes 4] [--gpus 2]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.children import write_report
from bench.environment import REPOSITORY, describe
from jsparse.evaluation.command import draw, show
from jsparse.evaluation.statistics import averages

BUDGETS, MASSES = (128, 256, 512, 1024, 2048), (0.8, 0.9, 0.95, 0.99)
CHANNELS = "bench/smollm2_channels.safetensors"  # jsparse calibrate-channels --text bench/README.md --tokens 4096
SELECTORS = ("quest(", f"double_sparsity(calibration={CHANNELS!r}, ", "tidal(")


def _behind_two(policy: str) -> str:
    """The policy, but the first two layers dense; TidalDecode has them so by itself."""
    return policy if policy.startswith("tidal") else f"dense_layers({policy}, n=2)"


YARDSTICKS = (
    *(f"streaming(sink=4, recent={recent})" for recent in (124, 252, 508, 1020)),
    *(f"oracle_top_k(budget={budget})" for budget in BUDGETS),
    *(f"oracle_top_p(p={p})" for p in MASSES),
)
TWILIGHT = (
    *(_behind_two(f"{name}budget={budget})") for name in SELECTORS for budget in BUDGETS),
    _behind_two("double_sparsity(budget=512)"),
    *(_behind_two(f"twilight({name}budget=2048), p={p})") for name in SELECTORS for p in MASSES),
    *(_behind_two(f"twilight(full(), p={p}, prune={way!r})") for p in MASSES for way in ("page_mass", "bits", "token")),
)
SETS = {"yardsticks": YARDSTICKS, "twilight": TWILIGHT}
TASKS = ("kl", "ppl", "passkey", "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
LENGTHS = (1024, 2048, 4096, 8192)


class Part(NamedTuple):
    """What one process measures: its place among all, the length, the policies, and what its report is called after."""

    place: int
    length: int
    policies: Sequence[str]
    name: str


def parts(policies: Sequence[str], lengths: Sequence[int], groups: int) -> list[Part]:
    """The policies of every length, dealt out to so many groups; long ones first, since they take longest."""
    dealt = [(length, group) for length in sorted(lengths, reverse=True) for group in range(groups)]
    return [
        Part(place, length, policies[group::groups], f"{length}_{group}" if groups > 1 else f"{length}")
        for place, (length, group) in enumerate(dealt)
    ]


def measure(args: argparse.Namespace, part: Part) -> dict[str, Any]:
    """The report of one part; what is there already is read.

    Raises:
        RuntimeError: its process failed.
    """
    path = args.json.with_stem(f"{args.json.stem}_{part.name}")
    if not (args.resume and path.exists()):
        command = [sys.executable, "-m", "jsparse", "eval", "--model", args.model, "--json", str(path)]
        command += [word for policy in part.policies for word in ("--policy", policy)]
        command += ["--tasks", ",".join(args.tasks), "--lengths", str(part.length)]
        command += ["--samples", str(args.samples), "--batch", str(args.batch), *["--resume"] * args.resume]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if args.gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(part.place % args.gpus)
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{path.stem} failed; what it had done lies beside {path}: go on with --resume")
    return json.loads(path.read_text(encoding="utf-8"))


def joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of them all, by length, without the samples; dense, which every group measures, once a length."""
    reports = sorted(reports, key=lambda report: report["settings"]["lengths"])
    cells: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for cell in (cell for report in reports for cell in report["cells"]):
        cells.setdefault((cell["policy"], cell["task"], cell["length"]), cell)
    of_all = {
        name: list(dict.fromkeys(value for report in reports for value in report["settings"][name]))
        for name in ("policies", "lengths")
    }
    return {
        "timestamp": reports[-1]["timestamp"],
        "environment": describe() | reports[0]["environment"],
        "settings": reports[0]["settings"] | of_all,
        "cells": [{name: value for name, value in cell.items() if name != "samples"} for cell in cells.values()],
        "averages": averages(list(cells.values())),
    }


def main() -> None:
    """Measures, prints the tables, draws the plots beside the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description="Measure the policies' quality.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--set", choices=SETS, default="yardsticks")
    parser.add_argument("--policy", nargs="+", help="instead of a set")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--groups", type=int, default=1, help="of policies, each a process a length (default 1)")
    parser.add_argument("--processes", type=int, default=1, help="side by side (default 1)")
    parser.add_argument("--gpus", type=int, default=1, help="that the processes share (default 1)")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.json = args.json.resolve()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.processes) as pool:
        wanted = parts(args.policy or SETS[args.set], args.lengths, args.groups)
        report = joined(list(pool.map(lambda part: measure(args, part), wanted)))
    write_report(args.json, report)
    show(report)
    draw(report, args.json.parent / args.json.stem)


if __name__ == "__main__":
    main()
