"""What does it cost that loops and branches make the host wait in the middle of a program?

Each of two processes compiles all programs anew: with XLA's default for what a GPU runs as a graph,
and with loops and branches among it, as `jsparse.runtime.compilation` has it. Both answer the same
requests, with random weights in bf16, and must give the same tokens:

    long      8 prompts of 30,720 tokens of Llama 3.1 8B's shape are read, and 256 tokens decoded
    sampled   8 prompts of 128, 256 tokens each, drawn with top_p
    small     64 prompts of 128 of SmolLM2's shape, 512 tokens each; and drawn (small_sampled)
    generate  8 prompts of 128, 256 tokens each, by jsparse.generate

    python -m bench.host_waits --json build/host_waits.json
"""

import hashlib
import json
import time
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import run_child, spread, write_report

DEFAULT = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
DRAWN = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
LONG, SHORT, NEW = 30_720, 128, 256


def child(default: bool, repeats: int) -> dict[str, Any]:
    """Measures all parts in this process."""
    from jsparse.runtime import compilation

    if default:
        compilation.COMPILER_OPTIONS["xla_gpu_enable_command_buffer"] = DEFAULT
    from bench.engine_speed import random_model
    from bench.lib.smollm2 import SMOLLM2
    from jsparse.engine.core import Engine

    params, measured = random_model(), dict[str, Any]()
    began = time.perf_counter()
    options: dict[str, Any] = {"enable_prefix_caching": False, "prepare": True}
    engine = Engine(params, max_num_seqs=8, max_model_len=LONG + NEW, **options)
    measured["start"] = {"seconds": time.perf_counter() - began}
    measured["long"] = served(engine, prompts(8, LONG), NEW, repeats)
    measured["sampled"] = served(engine, prompts(8, SHORT), NEW, repeats + 2, **DRAWN)
    del engine
    measured["generate"] = generated(params, prompts(8, SHORT), NEW, repeats + 2)
    del params
    params = random_model(SMOLLM2)
    engine = Engine(params, max_num_seqs=64, max_model_len=1024, **options)
    measured["small"] = served(engine, prompts(64, SHORT), 2 * NEW, repeats + 2)
    measured["small_sampled"] = served(engine, prompts(64, SHORT), 2 * NEW, repeats + 2, **DRAWN)
    return measured


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Returns random prompts."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 40_000, (count, tokens)).tolist()


def served(
    engine: Any, rows: list[list[int]], new: int, repeats: int, **sampling: Any
) -> dict[str, Any]:
    """Times an engine that answers prompts, and the part of it in which the host dispatches."""
    from jsparse.runtime.request import requests
    from jsparse.runtime.sampling_params import SamplingParams

    given = {"temperature": 0, "max_tokens": new, "ignore_eos": True} | sampling
    asked = requests(engine.params, rows, SamplingParams(**given), engine.policy)
    seconds, dispatch, tokens = [], [], []
    for _ in range(repeats):
        before, began = engine.counters.dispatch_seconds, time.perf_counter()
        answers = [engine.add(each) for each in asked]
        while not engine.idle:
            engine.step()
        seconds.append(time.perf_counter() - began)
        dispatch.append(engine.counters.dispatch_seconds - before)
        tokens = [each.builders[0].token_ids for each in answers]
    return {"seconds": spread(seconds), "dispatch": spread(dispatch), "tokens": digest(tokens)}


def generated(params: Any, rows: list[list[int]], new: int, repeats: int) -> dict[str, Any]:
    """Times jsparse.generate, once more than counts since the first time compiles."""
    import jsparse

    options = jsparse.SamplingParams(max_tokens=new, ignore_eos=True, **DRAWN)
    seconds, made = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        made = jsparse.generate(params, rows, sampling=options)
        seconds.append(time.perf_counter() - began)
    return {"seconds": spread(seconds[1:]), "tokens": digest([each.token_ids for each in made])}


def digest(tokens: list[list[int]]) -> str:
    """Returns a hash by which tokens are compared."""
    given = json.dumps([[int(token) for token in row] for row in tokens])
    return hashlib.sha256(given.encode()).hexdigest()


def main() -> None:
    """Measures both in turn, writes the report and prints the table."""
    parser = report_parser("host_waits", (__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="long runs of each")
    parser.add_argument("--child", choices=["default", "graphs"], help="measure in this process")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child == "default", args.repeats)))
        return
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    for kind in ("default", "graphs"):
        arguments = ["--child", kind, "--repeats", str(args.repeats)]
        report[kind] = run_child("bench.host_waits", arguments)
        write_report(args.json, report)
    for part, theirs in report["default"].items():
        ours = report["graphs"][part]
        for name in ("seconds", "dispatch"):
            if name in ours:
                print(f"{part:<14} {name:<9} {shown(theirs[name])} -> {shown(ours[name])}")
        print(
            f"{part:<14} the same tokens: {theirs.get('tokens') == ours.get('tokens')}", flush=True
        )


def shown(times: Any) -> str:
    """Returns the median of times, and how far they lie apart."""
    if isinstance(times, float):
        return f"{times:.2f} s"
    return f"{times['median']:.3f} s ({times['min']:.3f} to {times['max']:.3f})"


if __name__ == "__main__":
    main()
