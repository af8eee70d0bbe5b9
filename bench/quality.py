"""What do the policies cost in quality on a model?

It runs `jsparse eval` with one of these sets of policies, with the set's own tasks and lengths by
default:

    yardsticks     dense, StreamingLLM, and the oracles, which show the tokens that a perfect
                   selector would keep, given their number or their share of the attention mass
    eviction       policies that evict, at 12.5 % and 25 % of the length, compared with policies
                   that read or keep a similar amount; 512 decode steps, since at 64 little is
                   evicted
    second_turn    the same policies at 25 %, with a question that comes only after the context was
                   compressed
    every_method   every method at a quarter of the length, evicting or selecting, on the real texts
                   of `bench.real_text` (--files, --text)
    real_model     every method without training at 6, 12.5 and 25 % of up to 30K tokens, by kind of
                   text (--text); --groups 3 gives each budget its own process
    real_model_tasks
                   the same methods at 12.5 %: passkeys, needles, next lines of code, perplexity;
                   --files has a folder per length
    sparse_prefill the methods of sparse prefill, each before dense decoding: perplexity of the last
                   1,024 tokens, passkeys and needles

Each length, and each group of policies, has its own process. Several run in parallel, since much of
the time is compilation; they take turns on the GPUs and share their memory equally. PATH gets the
joint report without the samples; the reports of the processes, with every sample, are next to it.

    python -m bench.quality --json build/quality.json [--resume] [--lengths 1024 2048] [--groups 2]
                           [--processes 4] [--gpus 2]
    python -m bench.quality --json build/quality.json --draw build/quality.png

The second draws the KL divergence of a finished report over the share of tokens attended to, with a
line per method.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from statistics import fmean
from typing import Any, NamedTuple

from bench.lib.arguments import report_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.quality_sets import SETS
from bench.lib.subprocesses import write_report
from jsparse.cli.evaluate import show, write_page
from jsparse.evaluation.plan import plan
from jsparse.evaluation.report.drawings import quality_curves
from jsparse.evaluation.report.plots import methods_of, quality_points
from jsparse.evaluation.statistics import averages


class ReportPart(NamedTuple):
    """The work of one process, and the name of its report."""

    length: int
    policies: Sequence[str]
    name: str


def parts(policies: Mapping[int, Sequence[str]], groups: int) -> list[ReportPart]:
    """Deals the policies of every length out to the groups.

    Long lengths come first, since they take longest.
    """
    return [
        ReportPart(
            length, of_length[group::groups], f"{length}_{group}" if groups > 1 else f"{length}"
        )
        for length, of_length in sorted(policies.items(), reverse=True)
        for group in range(min(groups, len(of_length)))
    ]


def devices(gpus: int, processes: int) -> Queue[str]:
    """Returns CUDA_VISIBLE_DEVICES for each of the processes that run in parallel: one visible GPU.

    Raises:
        ValueError: fewer GPUs are visible.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    if len(visible) < gpus:
        raise ValueError(
            f"gpus={gpus}: "
            f"must be at most {len(visible)}, the number that CUDA_VISIBLE_DEVICES names"
        )
    free: Queue[str] = Queue()
    for nth in range(processes):
        free.put(visible[nth % gpus])
    return free


def measure(args: argparse.Namespace, part: ReportPart, free: Queue[str]) -> dict[str, Any]:
    """Returns the report of one part; with --resume a finished one is loaded.

    Raises:
        RuntimeError: its process failed.
        ValueError: the finished report has other policies, tasks or samples.
    """
    files, text = args.files, args.text
    if files and (files / str(part.length)).is_dir():
        files = files / str(part.length)
    # the process runs in another folder
    given = {name: at and str(at.resolve()) for name, at in (("files", files), ("text", text))}
    path = args.json.with_stem(f"{args.json.stem}_{part.name}")
    if not (args.resume and path.exists()):
        command = [
            sys.executable,
            "-m",
            "jsparse",
            "eval",
            "--model",
            args.model,
            "--json",
            str(path),
        ]
        command += [word for policy in part.policies for word in ("--policy", policy)]
        command += ["--tasks", ",".join(args.tasks), "--lengths", str(part.length)]
        command += [
            "--samples",
            str(args.samples),
            "--batch",
            str(args.batch or min(args.samples, max(1, SETS[args.set].tokens // part.length))),
            "--steps",
            str(args.steps),
            *(word for name, read in given.items() if read for word in (f"--{name}", read)),
            *["--resume"] * args.resume,
            *["--yardstick"] * args.yardstick,
        ]
        gpu = free.get()
        on_each = -(-args.processes // args.gpus)
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # the rest is for CUDA graphs
            "XLA_CLIENT_MEM_FRACTION": f"{0.9 / on_each:.3f}",
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, check=False
        )
        free.put(gpu)
        if done.returncode != 0:
            raise RuntimeError(
                f"{path.stem} failed; "
                f"its finished samples are next to {path}: continue with --resume"
            )
    report = json.loads(path.read_text(encoding="utf-8"))
    wanted = {
        "policies": list(plan(part.policies, args.tasks, [part.length], args.samples).policies)
    }
    wanted |= {"tasks": list(args.tasks)}
    wanted |= {name: getattr(args, name) for name in ("samples", "steps", "yardstick")} | given
    for name, value in wanted.items():
        if report["settings"][name] != value:
            raise ValueError(
                f"{path} has {name}={report['settings'][name]}, not {value}: "
                "resume with its original settings"
            )
    return report


def joined(reports: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the reports by length.

    Dense attention, which every group measures, appears once per length.
    """
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
        "environment": {**environment, **reports[0]["environment"]},
        "settings": reports[0]["settings"] | of_all,
        "cells": [*cells.values()],
        "averages": averages(list(cells.values())),
    }


def without_samples(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a report with means by text in place of the samples."""
    cells = [
        {name: value for name, value in cell.items() if name != "samples"}
        | by_text(cell["samples"])
        for cell in report["cells"]
    ]
    return {**report, "cells": cells}


def by_text(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the means of each text's samples; {} unless there are several texts."""
    texts = sorted({sample["meta"].get("source", "") for sample in samples})
    if texts in ([], [""]):
        return {}
    of = {
        text: [sample["values"] for sample in samples if sample["meta"].get("source") == text]
        for text in texts
    }
    return {
        "texts": {
            text: {name: fmean(each[name] for each in values) for name in values[0]}
            for text, values in of.items()
        }
    }


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Plots KL over the share attended to, with a panel per length and a line per method."""
    from matplotlib import pyplot

    lengths = report["settings"]["lengths"]
    width = 5 * len(lengths) + 4
    figure, _ = pyplot.subplots(1, len(lengths), figsize=(width, 6), layout="constrained")
    for axis, length in zip(figure.axes, lengths, strict=True):
        quality_curves("kl", quality_points(report, "kl", length), methods_of(report))(axis)
        axis.set_title(f"{length:,} tokens")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Parses the arguments and runs the benchmark."""
    parser = report_parser("quality", "Measure the policies' quality.", required=True)
    parser.add_argument("--model", default="smollm2", help="as for jsparse.load (default smollm2)")
    parser.add_argument(
        "--set",
        choices=SETS,
        default="yardsticks",
        help="policies, tasks and lengths (default yardsticks)",
    )
    parser.add_argument("--policy", nargs="+", help="expressions, instead of the set's")
    parser.add_argument(
        "--gates",
        type=Path,
        default="bench/gates",
        help="folder of the gates that some sets name, relative to the root of the checkout, "
        "since the report names it (default bench/gates)",
    )
    parser.add_argument("--tasks", nargs="+", help="instead of the set's")
    parser.add_argument("--files", type=Path, help="as in `jsparse eval`")
    parser.add_argument("--text", type=Path, help="as in `jsparse eval`")
    parser.add_argument("--lengths", nargs="+", type=int, help="instead of the set's")
    parser.add_argument("--samples", type=int, default=100, help="samples per task (default 100)")
    parser.add_argument(
        "--batch", type=int, help="samples per batch, instead of those that fill the set's tokens"
    )
    parser.add_argument(
        "--steps", type=int, help="decode steps of kl, ppl and attention, instead of the set's"
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=1,
        help="groups of policies, each a process per length (default 1)",
    )
    parser.add_argument("--processes", type=int, default=1, help="processes at once (default 1)")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs that the processes share (default 1)"
    )
    parser.add_argument("--resume", action="store_true", help="continue an unfinished run")
    parser.add_argument("--draw", type=Path, help="only plot the finished report, in this file")
    parser.add_argument(
        "--yardstick", action="store_true", help="as in `jsparse eval`, with the task kl"
    )
    args = parser.parse_args()
    for name in ("samples", "batch", "groups", "processes", "gpus"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.draw:
        draw(json.loads(args.json.read_text(encoding="utf-8")), args.draw)
        return
    try:
        run(args)
    except (RuntimeError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")


def run(args: argparse.Namespace) -> None:
    """Measures, prints the tables and writes a page with plots next to the JSON.

    Raises:
        RuntimeError: a process failed.
        ValueError: a policy, task or length is invalid, or a file of gates is missing.
    """
    environment, chosen = describe(allow_modified=args.allow_modified), SETS[args.set]
    args.tasks = args.tasks or chosen.tasks
    args.steps = chosen.steps if args.steps is None else args.steps
    more = {"steps": args.steps, "yardstick": args.yardstick}
    policies = {
        length: args.policy or chosen.policies(args.gates, length)
        for length in args.lengths or chosen.lengths
    }
    for length, of_length in policies.items():
        plan(of_length, args.tasks, [length], args.samples, **more)
    free = devices(args.gpus, args.processes)
    args.json = args.json.resolve()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.processes) as pool:
        wanted = parts(policies, args.groups)
        reports = list(pool.map(lambda part: measure(args, part, free), wanted))
        report = joined(reports, environment)
    write_report(args.json, without_samples(report))
    show(report)
    write_page(report, args.json.with_suffix(".html"))


if __name__ == "__main__":
    main()
