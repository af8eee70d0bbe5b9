"""How long does a server or a script wait for its programs, at its first start and at later ones?

Each start is its own process with a model of Llama 3.1 8B's shape on a GPU, or the demo model
elsewhere, spread over --ranks devices. It creates an `LLM` and generates a short output:

    cold     Nothing is on disk.
    stored   An earlier process has stored the programs (jsparse.runtime.stored).
    jax      Only jax's compilation cache has them, as for any jax program: they are traced and
             lowered, and looked up by their text.

    python -m bench.start --policy "quest(budget=2048)" --json build/start.json
"""

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import run_child, spread, write_report

REPEATS = 3
PHASES = ("imports", "model", "engine", "first answer", "next answer")


def main() -> None:
    """Starts processes, prints a table and writes the report."""
    parser = report_parser("start", __doc__ or "")
    parser.add_argument("--policy", default="quest(budget=2048)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--child", action="store_true", help="run as one of the processes")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(start(given.policy, given.ranks)))
        return
    report: dict[str, Any] = {
        "environment": describe(allow_modified=given.allow_modified),
        "policy": given.policy,
        "ranks": given.ranks,
        "starts": {},
    }
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "stored": [], "jax": []}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold", *("stored", "jax") * REPEATS):
            runs[kind].append(child(given.policy, given.ranks, folder, own=kind != "jax"))
            report["device"] = runs[kind][-1]["device"]
            report["starts"][kind] = summary(runs[kind])
            write_report(given.json, report)
    print(f"{'':8}" + "".join(f"{name:>14}" for name in PHASES) + f"{'traced':>10}")
    for kind, row in report["starts"].items():
        seconds = "".join(f"{row[name]['median']:14.2f}" for name in PHASES)
        print(f"{kind:8}{seconds}{row['traced']:7} of {row['programs']}")
    answers = {tuple(row["tokens"]) for row in report["starts"].values()}
    if len(answers) > 1:
        sys.exit(f"error: the starts answered differently: {answers}")


def summary(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the times of the starts of one kind, and the counts of the last one."""
    seconds = {name: spread([each["seconds"][name] for each in starts]) for name in PHASES}
    return seconds | {name: starts[-1][name] for name in ("programs", "traced", "tokens")}


def child(policy: str, ranks: int, folder: str, *, own: bool) -> dict[str, Any]:
    """Starts one process; `own`: whether it stores its programs itself or leaves them to jax."""
    caches = {"JSPARSE_CACHE_DIR": folder}
    if not own:
        # an existing cache setup is not changed, and nothing is stored then
        caches = {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "jax")}
    before = dict(os.environ)
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    os.environ.update(caches, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.3")
    try:
        options = ["--policy", policy, "--ranks", f"{ranks}"]
        return run_child("bench.start", ["--child", *options])
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(policy: str, ranks: int) -> dict[str, Any]:
    """Returns the time of each phase of a start in this process, and its output."""
    times = [time.perf_counter()]

    def lap() -> None:
        times.append(time.perf_counter())

    import jax

    import jsparse
    from jsparse.runtime import compilation

    on_gpu = jax.default_backend() == "gpu"
    lap()
    if on_gpu:
        from bench.engine_speed import random_model

        model = random_model(ranks=ranks)
        jax.block_until_ready(model.weights)
        options: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 32768}
    else:
        model, options = jsparse.load("smollm2", tensor_parallel_size=ranks), {}
    lap()
    lowered = []
    lower = compilation.Program.lower

    def counted(*args: Any, **kwargs: Any) -> Any:
        lowered.append(1)
        return lower(*args, **kwargs)

    compilation.Program.lower = counted
    llm = jsparse.LLM(model, policy, **options)
    lap()
    asked = jsparse.SamplingParams(max_tokens=16, temperature=0)
    answers = []
    for _ in range(2):
        (out,) = llm.generate([[5, 6, 7]], asked, use_tqdm=False)
        answers.append(out.outputs[0].token_ids)
        lap()
    if answers[0] != answers[1]:
        sys.exit(f"error: one prompt was answered in two ways: {answers}")
    # pending stores must be on disk before the next process starts
    compilation._compilers.shutdown(wait=True)
    seconds = [later - earlier for earlier, later in pairwise(times)]
    return {
        "device": jax.devices()[0].device_kind,
        "seconds": dict(zip(PHASES, seconds, strict=True)),
        "programs": llm.engine.programs.compiled,
        "traced": len(lowered),
        "tokens": answers[0],
    }


if __name__ == "__main__":
    main()
