"""How fast are steps of hard_kv, and how much memory does it need, compared with dense attention?

The shape of Llama 3.1 8B, random bf16 weights, K and V. Every part runs in its own process:

    c  decode steps after a prompt of 128K, dense and with hard_kv
    d  decode steps of all rows that fit: 1K prompts, 32K new tokens
    e  memory of one row after a prompt of 128K

Heads of hard_kv in c and d have their lengths on SmolLM2 (bench/results/eviction_trace). Seconds
are the host's over whole periods of 128 steps, each with one compression of all layers. In d,
tokens per second are integrated over the steps' times, without prefill: dense at eight lengths,
hard_kv at its steady size.

    python -m bench.eviction_speed --json build/eviction_speed.json
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.llama_8b import READ_BANDWIDTH
from bench.lib.subprocesses import run_child, write_report

PARTS = ("c", "d", "e")
STEP_BATCHES = (1, 4)
DENSE_ROWS, EVICTING_ROWS = 27, 256  # that fit in addition to the weights
PROMPT, NEW, LENGTHS = 1024, 32768, 8  # of d
DEFAULT = "hard_kv()"
STATIC = "hard_kv(metric='snapkv', budgets='uniform', merge=False)"
TINY = "hard_kv(budget=64, floor=48, cap=128, period=16, window=8{})"
TINY_STATIC = ", metric='snapkv', budgets='uniform', merge=False"


def steps_part(part: str, case: str, policy: str, tiny: bool) -> dict[str, Any]:
    """Measures one row of part c, d or e here; `case` is the batch."""
    from bench.lib import eviction_steps as steps

    scale, prompt, longest = steps.Scale(), PROMPT, PROMPT + NEW
    if tiny:
        scale, prompt, longest = steps.tiny(), 64, 512
    if part == "c":
        return steps.after_prompt(scale, int(case), policy)
    if part == "d" and policy == "dense":
        at = np.linspace(prompt, longest, LENGTHS).round().astype(int).tolist()
        return steps.dense_over_lengths(scale, int(case), longest, at)
    if part == "d":
        return steps.evicted_over_time(scale, int(case), policy)
    if case == "peak":
        return steps.compression_memory(scale, policy)
    return steps.prompt_memory(scale, policy)


def cases(part: str, tiny: bool, policies: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the cases and policies of part c, d or e."""
    if part == "c":
        batches = (2,) if tiny else STEP_BATCHES
        return [(str(batch), policy) for batch in batches for policy in ("dense", policies[0])]
    if part == "d":
        dense, evicting = (2, 4) if tiny else (DENSE_ROWS, EVICTING_ROWS)
        return [(str(dense), "dense"), *((str(evicting), policy) for policy in policies)]
    return [("prompt", policies[0]), ("peak", policies[0])]


def measured(part: str, tiny: bool, policies: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of a part, each measured in a child process; a failure is also a row."""
    flags = ["--tiny"] * tiny
    rows = []
    for case, policy in cases(part, tiny, policies):
        named = {"part": part, "case": case, "policy": policy}
        try:
            child = [*flags, "--child", part, case, policy]
            found = run_child("bench.eviction_speed", child, timeout_s=590)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"error": str(error)[-600:]}
        found = found if isinstance(found, list) else [found]
        found = [named | floored(row) for row in found]
        rows += found
        yield found
    if part == "d":
        yield throughput(rows, tiny)


def floored(row: dict[str, Any]) -> dict[str, Any]:
    """Adds the floor of a step."""
    if "step" not in row:
        return row
    floor = row["bytes"] / READ_BANDWIDTH
    return row | {"floor_seconds": floor, "over_floor": row["alone"]["median"] / floor}


def throughput(rows: Sequence[dict[str, Any]], tiny: bool) -> list[dict[str, Any]]:
    """Returns tokens per second of whole generations, integrated over the timed steps."""
    found, new = [], 448 if tiny else NEW
    for row in rows:
        if "lengths" in row:
            at = [point["slots"] for point in row["lengths"]]
            seconds = [point["step"]["median"] for point in row["lengths"]]
            # the ends may be slightly inside, at the last timed steps that fit
            step = float(np.trapezoid(seconds, at)) / (at[-1] - at[0])
        elif "step" in row:
            step = row["step"]["median"]
        else:
            continue
        named = {name: row[name] for name in ("part", "case", "policy")}
        rate = {"integrated": True, "mean_step": step, "tokens_per_second": row["batch"] / step}
        found.append(named | rate | {"new_tokens": new})
    return found


def line(row: dict[str, Any]) -> str:
    """Formats one line of the table."""
    text = f"{row['part']} {row.get('case', ''):8}{row.get('policy', ''):12.60}"
    if "error" in row:
        return f"{text} failed: {row['error'][-300:]}".replace("\n", " ")
    if "integrated" in row:
        step, rate = row["mean_step"] * 1e3, row["tokens_per_second"]
        return f"{text} {rate:.0f} tokens/s, {step:.2f} ms per step, integrated"
    if "step" in row:
        step, alone, all_layers = (
            row[name]["median"] * 1e3 for name in ("step", "alone", "compression")
        )
        return (
            f"{text} {step:.2f} ms per step, {alone:.2f} without compression, which takes "
            f"{all_layers:.2f}; floor {row['floor_seconds'] * 1e3:.2f}"
        )
    if "lengths" in row:
        return f"{text} " + ", ".join(
            f"{point['slots']}: {point['step']['median'] * 1e3:.2f} ms" for point in row["lengths"]
        )
    return f"{text} " + ", ".join(
        f"{name} {value / 1e9:.3f} GB" if value > 1e6 else f"{name} {value:.1f}"
        for name, value in row.items()
        if isinstance(value, int | float)
    )


def main() -> None:
    """Measures the requested parts and prints a table at the end."""
    parser = report_parser("eviction_speed", "Time hard_kv by part, and measure its memory.")
    parser.add_argument("--parts", default=",".join(PARTS), help="such as c,d (default all)")
    parser.add_argument(
        "--policy", nargs="+", help="policies of c, d and e; c and e take the first"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="small shapes for a CPU, to test the script; times mean nothing",
    )
    parser.add_argument(
        "--child",
        nargs=3,
        metavar=("PART", "CASE", "POLICY"),
        help="measure one here and print a JSON line",
    )
    args = parser.parse_args()
    if args.child:
        part, case, policy = args.child
        print(json.dumps(steps_part(part, case, policy, args.tiny)))
        return
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {args.parts}: {sorted(unknown)} must be among {list(PARTS)}")
    defaults = (TINY.format(""), TINY.format(TINY_STATIC)) if args.tiny else (DEFAULT, STATIC)
    policies = args.policy or defaults
    # the dense rows of d fill the device
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.96")
    report: dict[str, Any] = {
        "benchmark": "eviction_speed",
        "environment": describe(allow_modified=args.allow_modified),
        "policies": list(policies),
        "results": [],
    }
    for part in parts:
        for rows in measured(part, args.tiny, policies):
            report["results"] += rows
            write_report(args.json, report)
    print(*map(line, report["results"]), sep="\n")


if __name__ == "__main__":
    main()
