"""How long does one decode step take, compared with its bytes and with Hugging Face?

Llama 3.1 8B's shape, random bf16 weights, a cache full of random K and V, greedy, one token per
step, fed back on the device, by the session's own loop. Contenders, each in its own process:

    jsparse             the decode step, once for each policy of --policy
    hf-eager            transformers, StaticCache, SDPA
    hf-compile          the same under torch.compile
    hf-cudagraphs       the same under torch.compile(mode="reduce-overhead")

A policy's state is that after a prompt that filled the cache. path.py:function names one of your
own. replayed(…) around an expression replays counts of bench/results/twilight_trace. --shape
selects another model's shape for our steps: SmolLM2's, Qwen2.5 1.5B's, Llama 3.1 70B's or Qwen3
30B-A3B's, whose floor counts the experts that random choices of all rows need on average. --weights
q8_0 stores matrices as 8-bit blocks, q4_k_m in llama.cpp's mixture of 4 and 6 bits;
--kv-cache-dtype int8 stores K and V as 8-bit integers. --ranks spreads the model over that number
of GPUs; bytes are then per GPU. --profile adds a table of a
step's kernels on the first GPU, from two programs under jax's profiler after all timings: name
without its number, launches and microseconds per step, and the time during which any kernel ran.

With --drafts K a "step" is a round of `exact`: the policy drafts K tokens, and dense attention
verifies them. With random weights few are accepted; the time of a round does not depend on that.

A run of our step is long enough that its start on the host, for which the device waits, is less
than a hundredth of it. The floor is (weights + the K and V that the policy attends to) over the
measured read bandwidth of the device. The floor with selection adds the bytes of its state that the
policy must read to select (bench.lib.selection_bytes); a row lacks it if these are unknown.

    python -m bench.decode_step --json build/decode_step.json
"""

import itertools
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.llama_8b import (
    LLAMA_8B,
    LLAMA_70B,
    READ_BANDWIDTH,
    READ_BANDWIDTHS,
    boundary_constants,
    huggingface_model,
)
from bench.lib.shapes import QWEN3_30B_A3B, QWEN_1_5B, SMOLLM2
from bench.lib.subprocesses import run_child, spread, write_report
from jsparse.models.config import ModelConfig

CONTENDERS = ("jsparse", "hf-eager", "hf-compile", "hf-cudagraphs")
# programs without timing; steps per timing, in programs of any size; timings
WARM_UP, STEPS, RUNS = 5, 104, 5
SHAPES = {"8b": LLAMA_8B, "70b": LLAMA_70B, "1.5b": QWEN_1_5B, "135m": SMOLLM2}
SHAPES["qwen3-30b-a3b"] = QWEN3_30B_A3B
PROFILED = 2  # programs under the profiler
HF_STEPS = {"hf-eager": 4, "hf-compile": 20, "hf-cudagraphs": 20}


def jsparse_step(
    batch: int,
    context: int,
    policy: str,
    count: int,
    drafts: int = 0,
    *,
    shape: str = "8b",
    weights: str = "bf16",
    ranks: int = 1,
    kv_cache_dtype: str = "auto",
    profiled: bool = False,
) -> dict[str, Any]:
    """Times the package's own loop at a nearly full cache, `count` steps per program.

    With `drafts`, a program is a round, which is timed instead.
    """
    if drafts:
        count = drafts + 1
    import jax

    from bench.lib.kernel_timing import step_kernels, traced
    from bench.lib.replay import parse
    from bench.lib.selection_bytes import nbytes, selection_bytes
    from jsparse.benchmark.random_cache import full_session
    from jsparse.benchmark.steps import few_in_flight
    from jsparse.models.experts import unread_bytes
    from jsparse.runtime.sampling import greedy

    method = parse(policy, context)
    params = shaped_model(shape, context, ranks, weights)
    params = replace(params, kv_cache_dtype=kv_cache_dtype)
    config, arrays = params.config, params.weights
    spec = spec_of(config, batch, context, ranks=ranks, kv_cache_dtype=kv_cache_dtype)
    # compile maintenance before the first timing if any timing includes it
    measured, period = STEPS * RUNS + PROFILED * count, method.services.period
    # programs before the first maintenance: the last few steps are one program each
    due = 1 + sum(divmod(period, count)) if period <= WARM_UP * count + measured else 0
    warm_up = max(WARM_UP, due)
    held = context - warm_up * count - measured - 1
    steps = None if drafts else count
    session = full_session(params, method, spec, held, steps_per_program=steps, drafts=drafts)
    results = few_in_flight(session.steps(greedy, (), limits=[context] * batch))
    next(results)
    began = time.perf_counter()
    result = next(results)
    result.tokens.block_until_ready()
    compiled = time.perf_counter() - began
    for _ in range(warm_up - 1):
        result = next(results)
    times = []
    for _ in range(RUNS):
        result.tokens.block_until_ready()
        began = time.perf_counter()
        result, number = dispatched(results, STEPS // count, rounds=drafts > 0)
        result.tokens.block_until_ready()
        times.append((time.perf_counter() - began) / number)
    shares = jax.tree.map(lambda x: x[-1], result.stats)
    found = {}
    if profiled:
        (_, number), events = traced(lambda: dispatched(results, PROFILED, rounds=drafts > 0))
        found = {"kernels": step_kernels(events, number)}
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    embedding = nbytes(arrays["params"]["embed"])
    return {
        "device": device.device_kind,
        "seconds": spread(times),
        "warm_up": warm_up,
        "compile_seconds": compiled,
        "weight_bytes": int(nbytes(arrays) - unread_bytes(config, arrays, batch)) // ranks,
        "embedding_bytes": 0 if config.tie_word_embeddings else embedding // ranks,
        "cache_bytes": spec.nbytes,
        "selection_bytes": selection_bytes(method, spec),
        "attended_fraction": float(shares.attended.mean()),
        "read_fraction": float(shares.read.mean()),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    } | found


def dispatched(results: Iterator[Any], programs: int, *, rounds: bool) -> tuple[Any, int]:
    """Dispatches programs; returns the last one's result, and the number of all steps or rounds."""
    number = 0
    for _ in range(programs):
        result = next(results)
        number += 1 if rounds else len(result.tokens)  # before maintenance it may be one
    return result, number


def shaped_model(shape: str, context: int, ranks: int, weights: str) -> Any:
    """Returns a model of random weights, with enough positions for this context."""
    import jax.numpy as jnp

    from jsparse.benchmark.random_model import form_at_of, random_model

    config, given = SHAPES[shape], boundary_constants() if shape in ("8b", "70b") else {}
    config = replace(config, max_position_embeddings=max(context, config.max_position_embeddings))
    form_at = form_at_of("plain" if weights == "bf16" else weights, config)
    how: dict[str, Any] = {"form_at": form_at, "tensor_parallel_size": ranks}
    return replace(random_model(config, jnp.bfloat16, shape, **how), constants=given)


def spec_of(config: ModelConfig, batch: int, context: int, **how: Any) -> Any:
    """Returns the sizes of a case's cache; `how`: its other fields."""
    from jsparse.cache import CacheSpec

    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return CacheSpec(config.num_layers, batch, *heads, 16, context // 16, "bfloat16", **how)


def huggingface_step(batch: int, context: int, mode: str) -> dict[str, Any]:
    """Times transformers' forward with a static cache at the same position."""
    import torch
    from transformers import StaticCache

    model = huggingface_model()
    cache = StaticCache(config=model.config, max_cache_len=context)
    forward = {
        "hf-eager": lambda f: f,
        "hf-compile": torch.compile,
        "hf-cudagraphs": lambda f: torch.compile(f, mode="reduce-overhead"),
    }[mode](model.forward)
    ids = torch.ones((batch, 1), dtype=torch.long, device="cuda")
    position = torch.full((batch, 1), context - 8, device="cuda")
    with (
        torch.no_grad()
    ):  # the cache is allocated on first use, which must not be inside a CUDA graph
        model(input_ids=ids, past_key_values=cache, position_ids=position, use_cache=True)

    @torch.no_grad()
    def step(ids):
        torch.compiler.cudagraph_mark_step_begin()
        logits = forward(
            input_ids=ids, past_key_values=cache, position_ids=position, use_cache=True
        ).logits
        return logits[:, -1:].argmax(-1)

    began = time.perf_counter()
    for _ in range(WARM_UP):
        ids = step(ids).clone()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - began
    steps = HF_STEPS[mode]
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            ids = step(ids).clone()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / steps)
    return {
        "seconds": spread(times),
        "compile_seconds": compiled,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    """Runs every contender on every case and prints a table."""
    parser = report_parser("decode_step", (__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", default=["1x32768", "1x131072"], help="batch x context"
    )
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="contenders (default all)"
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["dense", "streaming(sink=4, recent=4092)"],
        help="policy expressions, or path.py:function for one of your own",
    )
    parser.add_argument(
        "--steps-per-program",
        type=int,
        default=1,
        help="steps per program of ours (default 1)",
    )
    parser.add_argument(
        "--drafts", type=int, default=0, help="time rounds of this many drafts instead of steps"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8b", help="of our steps")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=("bf16", "q8_0", "q4_k_m"),
        default=["bf16"],
        help="of our steps",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=("auto", "int8"),
        default=["auto"],
        help="of our steps",
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="GPUs for a step of ours")
    parser.add_argument("--profile", action="store_true", help="add a table by kernel to our rows")
    parser.add_argument(
        "--child",
        nargs=3,
        metavar=("NAME", "CASE", "POLICY"),
        help="measure one here and print a JSON line",
    )
    args = parser.parse_args()
    if args.child:
        name, case, policy = args.child
        batch, context = map(int, case.split("x"))
        run = (
            jsparse_step(
                *(batch, context, policy, args.steps_per_program, args.drafts),
                shape=args.shape,
                weights=args.weights[0],
                ranks=args.ranks[0],
                kv_cache_dtype=args.kv_cache_dtype[0],
                profiled=args.profile,
            )
            if name == "jsparse"
            else huggingface_step(batch, context, name)
        )
        print(json.dumps(run))
        return
    if args.shape != "8b" and any(name != "jsparse" for name in args.only):
        parser.error(
            f"--shape {args.shape}: Hugging Face's steps are of 8b alone: add --only jsparse"
        )
    count = args.steps_per_program
    settings = {"warm_up": WARM_UP, "steps": STEPS, "hf_steps": HF_STEPS, "runs": RUNS}
    settings |= {"steps_per_program": count, "drafts": args.drafts, "shape": args.shape}
    options = ["--steps-per-program", f"{count}", "--drafts", f"{args.drafts}"]
    options += ["--shape", args.shape]
    options += ["--profile"] if args.profile else []
    report = {
        "benchmark": "decode_step",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": settings,
        "results": [],
    }
    for case in args.cases:
        for name in args.only:
            ours = itertools.product(args.policy, args.weights, args.ranks, args.kv_cache_dtype)
            for policy, weights, ranks, kv in (
                ours if name == "jsparse" else [("dense", "bf16", 1, "auto")]
            ):
                asked = [*options, "--weights", weights, "--ranks", f"{ranks}"]
                run = measure(name, case, policy, [*asked, "--kv-cache-dtype", kv])
                row = {"case": case, "name": name, "policy": policy, "weights": weights}
                row |= {"ranks": ranks, "kv_cache_dtype": kv, **run}
                report["results"].append(row)
                print(summary(row), flush=True)
                write_report(args.json, report)


def measure(name: str, case: str, policy: str, options: list[str]) -> dict[str, Any]:
    """Measures one row in a child process; a contender that fails is a row with its error."""
    try:
        asked = [*options, "--child", name, case, policy]
        row = run_child("bench.decode_step", asked, timeout_s=400)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)[-600:]}
    return row | floors(row) if "weight_bytes" in row else row


def floors(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the floors of a row of ours, and its median over each."""
    median = row["seconds"]["median"]
    bandwidth = READ_BANDWIDTHS.get(row["device"], READ_BANDWIDTH)
    attended = row["cache_bytes"] * row["attended_fraction"]
    # a step reads one row of the input embedding
    floor = (row["weight_bytes"] - row["embedding_bytes"] + attended) / bandwidth
    found = {"floor_seconds": floor, "over_floor": median / floor}
    if row["selection_bytes"] is None:
        return found
    floor += row["selection_bytes"] / bandwidth
    found |= {"floor_with_selection_seconds": floor, "over_floor_with_selection": median / floor}
    return found


def summary(row: dict[str, Any]) -> str:
    """Formats one line of the table."""
    if "error" in row:
        return f"{row['case']:>10} {row['name']:14} failed: {row['error'][-300:]}"
    seconds = row["seconds"]
    median, minimum, maximum = (seconds[key] * 1e3 for key in ("median", "min", "max"))
    text = f"{row['case']:>10} {row['name']:14} {row['policy']:30} {row['weights']:6}"
    text += " int8 KV" if row["kv_cache_dtype"] == "int8" else ""
    text += f" on {row['ranks']}" if row["ranks"] > 1 else ""
    text += f"{median:8.2f} ms ({minimum:.2f}-{maximum:.2f})"
    if "floor_seconds" in row:
        text += f"  floor {row['floor_seconds'] * 1e3:.2f} ms, {row['over_floor']:.2f}x"
    if "floor_with_selection_seconds" in row:
        text += f"; with selection {row['floor_with_selection_seconds'] * 1e3:.2f} ms"
        text += f", {row['over_floor_with_selection']:.2f}x"
    return text + f"  compile {row['compile_seconds']:.0f} s"


if __name__ == "__main__":
    main()
