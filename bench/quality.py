"""What do the policies cost in quality on SmolLM2?

It runs `jsparse eval` with one of these sets of policies, with the set's own tasks and lengths
unless others are named:

    yardsticks   dense, StreamingLLM, and the oracles, which show what a perfect selector would
                 keep, given the number of tokens or the share of the attention mass
    twilight     base selectors at several budgets, and Twilight over them, the first two layers
                 dense as in its paper
    lychee       LycheeDecode with trained gates and with those of `bench.head_baselines`, its rules
                 of picking, and other policies that attend to about as much
    defaults     policies as they are by default next to their papers' versions, and what `auto`
                 could choose
    eviction     policies that evict, at 12.5 % and 25 % of the length, next to what reads or keeps
                 about as much; 512 decode steps, since at 64 little is evicted
    eviction_ablation   hard_kv by metric, budget rule and merging. Uniform and joint budgets have
                 12.5 %; the rules that count by p have several p, and the report tells their KL
                 where they read as much as uniform budgets do, between the nearest two
    second_turn  the same policies at 25 %, where the question comes only after the context was
                 compressed
    every_method   every method at a quarter of the length, evicting or selecting, on the real texts
                 of `bench.real_text` (--files, --text)
    lfps         LFPS, exact, with the paper's rule, penalty and alignment, one at a time and
                 together, next to an oracle, Quest and StreamingLLM; then exact LFPS at the shares
                 that the forms with the paper's rule attended to, which may be less than the budget
    lychee_cluster   LycheeCluster at three budgets, next to Quest, ClusterKV, ArkVale, LFPS,
                 StreamingLLM and oracles that attend to as many tokens, and one argument of it
                 changed at a time

Each length, and each group of policies, is a process of its own. Several run side by side, since
much of the time goes into compiling; they share the GPUs in turn. PATH holds the report of them
all, without the samples; the reports of the processes, with every sample, lie beside it.

    python -m bench.quality --json build/quality.json [--resume] [--lengths 1024 2048] [--groups 2]
                            [--processes 4] [--gpus 2]
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.subprocesses import write_report
from jsparse.cli.evaluate import draw, show
from jsparse.evaluation.plan import plan
from jsparse.evaluation.report.statistics import averages
from jsparse.policies.hard_kv import Metric

BUDGETS, MASSES = (128, 256, 512, 1024, 2048), (0.8, 0.9, 0.95, 0.99)
# jsparse calibrate-channels --text bench/README.md --tokens 4096, at revision 5ba8027
CHANNELS = "bench/smollm2_channels.safetensors"
SELECTORS = ("quest(", f"double_sparsity(calibration={CHANNELS!r}, ", "tidal(")


def _behind_two(policy: str) -> str:
    """Makes the first two layers dense, which TidalDecode does by itself."""
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
    *(
        _behind_two(f"twilight(all_pages(), p={p}, prune={way!r})")
        for p in MASSES
        for way in ("page_mass", "bits", "token")
    ),
)
TASKS = (
    "kl",
    "ppl",
    "passkey",
    "niah_single_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "vt",
    "cwe",
    "fwe",
)
ANSWERED_WHEN_LONG = TASKS[:4]
AGAIN = 14  # the layer of SmolLM2 that picks again, by bench.layer_overlap
TIDAL_DENSE = 4 / 30  # the share of layers that are dense then
PAGE = 16
RULE = "candidates='threshold', exact=True"  # the paper's, of LFPS
AT_BUDGET, BY_SHARE = ("joint", "uniform"), ("n_star", "calibrated")  # rules of hard_kv
SHARES = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
OPTIONS = re.compile(
    r"\bp=(?P<p>[\d.]+), .*metric='(?P<metric>\w+)', budgets='(?P<rule>\w+)', merge=True"
)
DUO_RETRIEVAL = 11 / 90  # the share of retrieval heads in direct.safetensors
GATE_FILES = "hard_kuma.safetensors", "direct.safetensors"
GATES = (
    "hard_kuma",
    "hard_concrete",
    "direct",
    "hard_kuma_refreshed",
    "random_0",
    "random_1",
    "mass",
)


def lychee(gates: Path) -> tuple[str, ...]:
    """Returns the policies of the set "lychee", given the folder of the gates."""
    files = [str(gates / f"{name}.safetensors") for name in GATES]
    ways = (
        *(f"value={value}" for value in (256, 1024, 2048)),
        *(f"value={value}, granularity='token'" for value in (256, 512, 1024)),
        *(f"value={value}, rule='ratio'" for value in (0.95, 0.9, 0.75)),
        *(f"value={value}, rule='top_p'" for value in (0.8, 0.9, 0.95)),
        *(f"value={value}, rule='threshold'" for value in (0.01, 0.003, 0.001)),
        "value=512, correct_every=32",
        "value=512, sink=0, recent=0",
    )
    return (
        *(f"lychee_decode({file!r}, value=512)" for file in files),
        *(f"lychee_decode({files[0]!r}, {way})" for way in ways),
        *(f"duo_attention({file!r}, sink=64, recent=448)" for file in (files[0], files[2])),
        *(f"tidal(budget=512{more})" for more in ("", ", sink=0, recent=0")),
        *(f"tidal(budget=512, again={AGAIN}{more})" for more in ("", ", correct_every=32")),
        _behind_two("quest(budget=1024)"),
    )


def defaults(gates: Path) -> tuple[str, ...]:
    """Returns the policies of the set "defaults", given the folder of the gates."""
    labels, paper = f"double_sparsity(calibration={CHANNELS!r}, ", "slack=1.0, group='max'"
    picked = f"lychee_decode({str(gates / 'hard_kuma.safetensors')!r}, value=512"
    behind_two = (
        "quest(budget=1024)",
        *(f"quest(budget=2048{more})" for more in ("", f", {paper}", ", bounds_dtype='uint8'")),
        *(f"{labels}budget={budget})" for budget in (256, 2048)),
        *(f"double_sparsity(budget={budget})" for budget in (512, 1024)),
        "twilight(quest(budget=2048), p=0.95)",
        f"twilight({labels}budget=2048), p=0.95)",
        "twilight(all_pages(), p=0.95)",
        "twilight(all_pages(), p=0.95, prune='token')",
    )
    return (
        *map(_behind_two, behind_two),
        *(f"tidal(budget=2048{more})" for more in ("", f", again={AGAIN}", ", sink=0, recent=0")),
        *(f"{picked}{more})" for more in ("", ", sink=0, recent=0")),
        "oracle_top_k(budget=1024)",
        "oracle_top_p(p=0.95)",
        "twilight(all_pages(), p=0.95)",
        "twilight(all_pages(), p=0.95, prune='token')",
        "twilight(all_pages(), p=0.9)",
        *(f"twilight(quest(budget={budget}), p=0.95)" for budget in (2048, 4096)),
        "twilight(double_sparsity(budget=2048), p=0.95)",
    )


def hard_kv(budget: int, more: str = "") -> str:
    """Returns hard_kv whose heads may hold from half to twice the budget."""
    return f"hard_kv(budget={budget}, floor={budget // 2}, cap={2 * budget}{more})"


def at_budget(budget: int) -> tuple[str, ...]:
    """Returns the policies that keep `budget` slots per head, and those that read as many.

    StreamingLLM and Quest keep everything, whatever they read. The questions of the tasks have
    about ten tokens, which the default window of 32 queries drowns in filler: hence those of 8.
    """
    return (
        hard_kv(budget),
        hard_kv(budget, ", window=8, metric='snapkv'"),
        hard_kv(budget, f", recent={budget // 2}"),
        f"snapkv(budget={budget}, window=32)",
        *(f"{name}(budget={budget})" for name in ("snapkv", "ada_kv", "h2o", "r_kv")),
        f"streaming(sink=4, recent={budget - 4})",
        f"quest(budget={budget})",
        _behind_two(f"quest(budget={budget})"),
    )


def at_a_quarter(gates: Path, length: int) -> tuple[str, ...]:
    """Returns the policies at a quarter of the length, with DuoAttention and a yardstick.

    The window of DuoAttention's other heads is such that all heads hold a quarter on average.
    """
    window = round((0.25 - DUO_RETRIEVAL) / (1 - DUO_RETRIEVAL) * length)
    return (
        *at_budget(length // 4),
        f"duo_attention({str(gates / 'direct.safetensors')!r}, sink=64, recent={window - 64})",
        "twilight(all_pages(), p=0.95)",
    )


def eviction(gates: Path, length: int) -> tuple[str, ...]:
    """Returns the policies of the set "eviction", given the folder of the gates and the length.

    raas keeps the whole prompt; its budget is a quarter of the new tokens.
    """
    return (
        *at_budget(length // 8),
        *at_a_quarter(gates, length),
        "raas(budget=128)",
    )


def ablation(gates: Path, length: int) -> tuple[str, ...]:
    """Returns hard_kv by metric, budget rule and merging, for heads of any size up to a quarter.

    With a fixed p a rule would be measured by how much it happens to keep; hence SHARES.
    """

    def made(metric: str, rule: str, *, merge: bool = True, p: float = 0.9) -> str:
        return (
            f"hard_kv(budget={length // 8}, floor=1, cap={length // 4}, p={p}, metric={metric!r}, "
            f"budgets={rule!r}, merge={merge})"
        )

    return tuple(
        policy
        for metric in get_args(Metric)
        for policy in (
            *(made(metric, rule, merge=merge) for rule in AT_BUDGET for merge in (True, False)),
            *(made(metric, rule, p=p) for rule in BY_SHARE for p in SHARES),
        )
    )


class EqualReads(NamedTuple):
    """Holds what a rule that counts by p costs where it reads as much as uniform budgets do.

    Attributes:
        metric, rule: those of hard_kv.
        length: tokens, prompt and answer together.
        read: the share of what dense attention reads, of uniform budgets.
        uniform: the KL of uniform budgets.
        p, kl: interpolated between those that read nearest to that, over the logarithm of what they
            read; None where all read more or all less.
    """

    metric: str
    rule: str
    length: int
    read: float
    uniform: float
    p: float | None
    kl: float | None


def equal_reads(cells: Sequence[Mapping[str, Any]]) -> list[EqualReads]:
    """Compares the rules that count by p with uniform budgets, all merged, by metric and length."""
    measured: dict[tuple[str, int], dict[str, list[tuple[float, float, float]]]] = {}
    for cell in cells:
        options = OPTIONS.search(cell["policy"])
        if cell["task"] == "kl" and options:
            read, kl = (cell["metrics"][name]["mean"] for name in ("read", "kl"))
            rules = measured.setdefault((options["metric"], cell["length"]), {})
            rules.setdefault(options["rule"], []).append((read, float(options["p"]), kl))
    rows = []
    for (metric, length), rules in measured.items():
        for rule in BY_SHARE:
            if "uniform" not in rules or rule not in rules:
                continue
            ((read, _, uniform),) = rules["uniform"]
            reads, *others = zip(*sorted(rules[rule]), strict=True)
            p = kl = None
            if reads[0] <= read <= reads[-1]:
                p, kl = (float(np.interp(np.log(read), np.log(reads), y)) for y in others)
            rows.append(EqualReads(metric, rule, length, read, uniform, p, kl))
    return rows


def show_equal_reads(rows: Sequence[EqualReads]) -> None:
    """Prints them, to four digits."""
    table = Table(*("uniform's KL" if name == "uniform" else name for name in EqualReads._fields))
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row))
    Console().print(table)


def lfps(length: int) -> tuple[str, ...]:
    """Returns LFPS at 2 % and 4 % of the length, next to those that read as many tokens.

    From exact weights to the paper's form, one thing changes at a time. The rule's candidates are
    not cut off, as in the paper. Quest's tokens are rounded up to whole pages.
    """
    rule = f"{RULE}, wider=50"  # all tokens from 2 % on
    return tuple(
        policy
        for share in (0.02, 0.04)
        for tokens in [round(share * length)]
        for policy in (
            f"lfps(budget={share})",
            f"lfps(budget={share}, exact=True)",
            f"lfps(budget={share}, exact=True, penalty=0.5)",
            f"lfps(budget={share}, {rule})",
            f"lfps(budget={share}, {rule}, penalty=0.5)",
            f"lfps(budget={share}, {rule}, penalty=0.5, aligned=False)",
            f"oracle_top_k(budget={tokens})",
            f"quest(budget={-(-tokens // PAGE) * PAGE})",
            f"streaming(sink=4, recent={tokens - 4})",
        )
    )


def at_the_rules_share(report: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    """Returns LFPS with exact weights alone, at each share that the paper's rule attended to.

    The rule marks fewer tokens than the budget allows in some heads, so that it attends to fewer.
    """
    found: dict[int, dict[str, None]] = {}
    for cell in report["cells"]:
        if RULE.partition(",")[0] in cell["policy"] and "attended" in cell["metrics"]:
            share = cell["metrics"]["attended"]["mean"]
            found.setdefault(cell["length"], {})[f"lfps(budget={share:.4f}, exact=True)"] = None
    return {length: tuple(policies) for length, policies in found.items()}


def lychee_cluster(length: int) -> tuple[str, ...]:
    """Returns LycheeCluster and those that attend to as many tokens, the first two layers dense.

    Its arguments are changed one at a time at the middle budget; chunks of fixed size are at all.
    """
    changed = (
        "rank='bound'",
        *(f"cluster_size={size}" for size in (1, 4, 8)),
        "pooling='max'",
        "normalise=False",
        "levels=2",
    )
    at_budgets = tuple(
        policy
        for budget in (256, 512, 1024)
        for policy in (
            f"lychee_cluster(budget={budget})",
            f"lychee_cluster(budget={budget}, chunks='fixed')",
            f"cluster_kv(budget={budget})",
            f"arkvale(budget={budget})",
            f"quest(budget={budget})",
            f"lfps(budget={budget / length:.5f})",
            f"streaming(sink=16, recent={budget - 16})",
            f"oracle_top_k(budget={budget}, granularity='page')",
            f"oracle_top_k(budget={budget})",
        )
    )
    ablations = (f"lychee_cluster(budget=512, {way})" for way in changed)
    return tuple(map(_behind_two, (*at_budgets, *ablations)))


def every_method(gates: Path, length: int) -> tuple[str, ...]:
    """Returns every method such that heads read a quarter of the length on average.

    `tidal`, `lychee_decode` and `duo_attention` read everything in some layers or heads, and so
    have less in the others. What Twilight reads follows from p.
    """
    budget = length // 4
    in_layers, in_heads = (
        16 * round(length * (0.25 - dense) / (1 - dense) / 16)
        for dense in (TIDAL_DENSE, DUO_RETRIEVAL)
    )
    return (
        f"streaming(sink=4, recent={budget - 4})",
        f"oracle_top_k(budget={budget})",
        f"quest(budget={budget})",
        f"quest(budget={budget}, slack=1.0, group='max')",
        f"double_sparsity(budget={budget})",
        f"tidal(budget={in_layers}, again={AGAIN})",
        *(f"lychee_decode({str(gates / name)!r}, value={in_heads})" for name in GATE_FILES),
        f"duo_attention({str(gates / GATE_FILES[1])!r}, sink=4, recent={in_heads - 4})",
        f"lfps(budget={budget / length:.5f})",
        f"lfps(budget={budget / length:.5f}, exact=True)",
        f"lychee_cluster(budget={budget})",
        f"cluster_kv(budget={budget})",
        f"arkvale(budget={budget})",
        *(f"{name}(budget={budget})" for name in ("snapkv", "ada_kv", "h2o", "r_kv")),
        hard_kv(budget),
        hard_kv(budget, ", window=8, metric='snapkv'"),
        f"twilight(quest(budget={length // 2}), p=0.95)",
        "twilight(all_pages(), p=0.9)",
        "twilight(all_pages(), p=0.95)",
    )


class Set(NamedTuple):
    """A set of policies that are measured together.

    Attributes:
        policies: maps the folder of gates and a length to expressions; dense() is always measured
            too.
        tasks: the default tasks; SmolLM2 answers few of them at 4K and 8K.
        lengths: the default lengths.
        steps: the default number of decode steps of the tasks that compare with dense.
        afterwards: maps the report of all these to further policies of each length, measured next.
    """

    policies: Callable[[Path, int], Sequence[str]]
    tasks: Sequence[str]
    lengths: Sequence[int]
    steps: int = 64
    afterwards: Callable[[Mapping[str, Any]], Mapping[int, Sequence[str]]] = lambda report: {}


LONG = (4096, 8192)
SETS = {
    "yardsticks": Set(lambda *_: YARDSTICKS, TASKS, (1024, 2048, *LONG)),
    "twilight": Set(lambda *_: TWILIGHT, ANSWERED_WHEN_LONG, LONG),
    "lychee": Set(lambda gates, _: lychee(gates), ANSWERED_WHEN_LONG, LONG),
    "defaults": Set(lambda gates, _: defaults(gates), ("kl", "passkey"), LONG),
    "eviction": Set(eviction, ANSWERED_WHEN_LONG, LONG, steps=512),
    "eviction_ablation": Set(ablation, ("kl", "ppl"), (4096,), steps=512),
    "lfps": Set(
        lambda _, length: lfps(length),
        ("kl", "attention", "passkey"),
        LONG,
        steps=128,
        afterwards=at_the_rules_share,
    ),
    "lychee_cluster": Set(
        lambda _, length: lychee_cluster(length),
        ("kl", "ppl", "passkey", "niah_single_1", "json_retrieval"),
        LONG,
    ),
    "every_method": Set(
        every_method,
        ("kl", "passkey", "longbench_lcc", "niah_single_2", "niah_multikey_1"),
        (4096,),
    ),
    "second_turn": Set(at_a_quarter, ("passkey_turn2", "niah_single_1_turn2"), LONG),
}


class Part(NamedTuple):
    """The work of one process, and the name of its report."""

    length: int
    policies: Sequence[str]
    name: str


def parts(policies: Mapping[int, Sequence[str]], groups: int) -> list[Part]:
    """Deals the policies of every length out to the groups.

    Long lengths come first, since they take longest.
    """
    return [
        Part(length, of_length[group::groups], f"{length}_{group}" if groups > 1 else f"{length}")
        for length, of_length in sorted(policies.items(), reverse=True)
        for group in range(min(groups, len(of_length)))
    ]


def devices(gpus: int, processes: int) -> Queue[str]:
    """Returns CUDA_VISIBLE_DEVICES for each of the processes that run at once: one visible GPU.

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


def measure(args: argparse.Namespace, part: Part, free: Queue[str]) -> dict[str, Any]:
    """Returns the report of one part; with --resume a finished one is read.

    Raises:
        RuntimeError: its process failed.
        ValueError: the finished report has other policies, tasks or samples.
    """
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
            str(args.batch),
            "--steps",
            str(args.steps),
            *(
                word
                for name in ("files", "text")
                if (path_of := getattr(args, name)) is not None
                for word in (f"--{name}", str(path_of))
            ),
            *["--resume"] * args.resume,
            *["--yardstick"] * args.yardstick,
        ]
        gpu = free.get()
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, check=False
        )
        free.put(gpu)
        if done.returncode != 0:
            raise RuntimeError(
                f"{path.stem} failed; "
                f"its finished samples lie beside {path}: continue with --resume"
            )
    report = json.loads(path.read_text(encoding="utf-8"))
    wanted = {
        "policies": list(plan(part.policies, args.tasks, [part.length], args.samples).policies)
    }
    wanted |= {"tasks": list(args.tasks)}
    wanted |= {name: getattr(args, name) for name in ("samples", "steps", "yardstick")}
    for name, value in wanted.items():
        if report["settings"][name] != value:
            raise ValueError(
                f"{path} has {name}={report['settings'][name]}, not {value}: "
                "resume with the settings it started with"
            )
    return report


def joined(reports: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the reports by length, without the samples.

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
        "cells": [
            {name: value for name, value in cell.items() if name != "samples"}
            for cell in cells.values()
        ],
        "averages": averages(list(cells.values())),
    }


def main() -> None:
    """Parses the arguments and runs the benchmark."""
    parser = report_parser("quality", "Measure the policies' quality.", required=True)
    parser.add_argument(
        "--model", default="smollm2", help="as jsparse.load takes it (default smollm2)"
    )
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
    parser.add_argument("--batch", type=int, default=50, help="samples per batch (default 50)")
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
    parser.add_argument(
        "--yardstick", action="store_true", help="as in `jsparse eval`, beside the task kl"
    )
    args = parser.parse_args()
    for name in ("samples", "batch", "groups", "processes", "gpus"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    try:
        run(args)
    except (RuntimeError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")


def run(args: argparse.Namespace) -> None:
    """Measures, prints the tables and draws the plots beside the JSON.

    Raises:
        RuntimeError: a process failed.
        ValueError: a policy, task or length is refused, or a file of gates is missing.
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
        if not args.policy and (more := chosen.afterwards(report)):
            wanted = [part._replace(name=f"{part.name}_more") for part in parts(more, args.groups)]
            reports += pool.map(lambda part: measure(args, part, free), wanted)
            report = joined(reports, environment)
    if rows := equal_reads(report["cells"]):
        report["equal_reads"] = [row._asdict() for row in rows]
    write_report(args.json, report)
    show(report)
    if rows:
        show_equal_reads(rows)
    draw(report, args.json.parent / args.json.stem)


if __name__ == "__main__":
    main()
