"""What throughput do several engines on several GPUs have, compared with one?

Random weights and prompts, over HTTP. For each model and each number of engines of --engines behind
the router, a smaller measurement comes first, so that all programs are compiled:

    ragged      prompts of 2,048 tokens at once, new tokens log-uniform in 32 to 2,048; the number
                per engine is the same with several as with one, so that the last outputs wait for
                the same number of others; also the busy processor cores of router, replicas and
                clients
    documents   16 documents of 8,192 tokens, 8 questions of 128 about each in any order, 32 new,
                five times: the median time, and the share of the prompts' tokens found in the
                engines' prefix caches

The models are Llama 3.1 8B's shape (256 requests per engine) and SmolLM2's (768), in bf16.

    python -m bench.replica_speed --json build/replica_speed.json
"""

import json
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.engine_speed import LLAMA_8B, NEW, PROMPT, random_model
from bench.lib.arguments import report_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.shapes import SMOLLM2
from bench.lib.subprocesses import write_report
from bench.server_speed import over_http, with_words

if TYPE_CHECKING:
    import jsparse
    from jsparse.benchmark.workload import WorkloadRequest

REQUESTS = {"8b": 256, "small": 768}
WORKLOADS = ("ragged", "documents")
DOCUMENTS, QUESTIONS, DOCUMENT = 16, 8, 8192
DOCUMENT_SEEDS = (200, 300, 400, 500, 600)
CLIENTS = 6  # processes that send requests: a single one would be as busy as the engines


def an_engine(model: str, policy: str) -> "jsparse.AsyncEngine":
    """Returns an engine with all its programs compiled."""
    import jsparse

    params = with_words(random_model(LLAMA_8B if model == "8b" else SMOLLM2))
    longest = params.config.max_position_embeddings
    options: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": min(longest, 16_384)}
    return jsparse.AsyncEngine(params, policy, prepare=True, **options)


def serve(model: str, policy: str, engines: int) -> None:
    """Serves until a signal, and prints the address."""
    from jsparse.server.front import Options
    from jsparse.server.replicas.serve import serve
    from jsparse.server.run import listen

    listening = listen("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    make = [partial(an_engine, model, policy)] * engines
    serve(Options("random"), make, 1, listening, on_ready=lambda _: print(address, flush=True))


@contextmanager
def serving(model: str, policy: str, engines: int) -> Iterator[tuple[str, int]]:
    """Serves in its own process; yields the address and the process id."""
    command = [sys.executable, "-m", "bench.replica_speed", "--serve", model, policy, f"{engines}"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"{' '.join(command)} did not serve")
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(60)


def asked(address: str, workload: "Sequence[WorkloadRequest]") -> dict[str, Any]:
    """Sends requests from several processes; returns the total rates."""
    parts = [workload[nth::CLIENTS] for nth in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as threads:
        made = list(threads.map(partial(over_http, address), parts))
    if failed := sum(each["failed"] for each in made):
        raise RuntimeError(f"{failed} requests failed: {[set(each['errors']) for each in made]}")
    seconds = max(each["duration"] for each in made)
    tokens = sum(each.tokens for each in workload)
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def processor_seconds(pid: int) -> dict[str, float]:
    """Returns the processor seconds of the router, its replicas and the clients so far."""
    import psutil

    router = psutil.Process(pid)
    every = {"router": router} | {f"replica {n}": each for n, each in enumerate(router.children())}
    times = {name: each.cpu_times() for name, each in every.items()}
    clients = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {name: each.user + each.system for name, each in times.items()} | {
        "clients": clients.ru_utime + clients.ru_stime
    }


def ragged(vocab_size: int, num_prompts: int, seed: int) -> "list[WorkloadRequest]":
    """Returns prompts of one length, with short or long outputs."""
    from jsparse.benchmark.workload import random_workload

    lengths: dict[str, Any] = {"input_len": PROMPT, "output_len": (NEW // 8, 8 * NEW)}
    return random_workload(vocab_size, num_prompts=num_prompts, seed=seed, **lengths)


def documents(vocab_size: int, length: int, seed: int) -> "list[WorkloadRequest]":
    """Returns questions about several documents, in any order."""
    from jsparse.benchmark.workload import random_workload

    workload = [
        each
        for nth in range(DOCUMENTS)
        for each in random_workload(
            *(vocab_size,),
            num_prompts=QUESTIONS,
            input_len=128,
            output_len=32,
            shared_prefix=length,
            seed=seed + nth,
        )
    ]
    random.Random(0).shuffle(workload)
    return workload


def counted(address: str) -> tuple[float, float]:
    """Returns the prompt tokens found in prefix caches, and all prompt tokens."""
    import httpx

    text = httpx.get(f"{address}/metrics").text
    hits, queries = (
        sum(float(value) for value in re.findall(rf"^jsparse:{name}_total\S* (\S+)$", text, re.M))
        for name in ("prefix_cache_hits", "prefix_cache_queries")
    )
    return hits, queries


def measured(model: str, policy: str, engines: int, workloads: Sequence[str]) -> dict[str, Any]:
    """Measures one model with `engines` engines."""
    row: dict[str, Any] = {"model": model, "policy": policy, "engines": engines}
    vocab_size = (LLAMA_8B if model == "8b" else SMOLLM2).vocab_size
    length = DOCUMENT if model == "8b" else DOCUMENT // 2
    began = time.perf_counter()
    with serving(model, policy, engines) as (address, pid):
        row["start_seconds"] = time.perf_counter() - began
        print(f"{model}: {engines} engines are ready: {row}", flush=True)
        if "ragged" in workloads:
            count = REQUESTS[model] * engines
            asked(address, ragged(vocab_size, count // 2, seed=0))
            before = processor_seconds(pid)
            row["ragged"] = asked(address, ragged(vocab_size, count, seed=1))
            taken = processor_seconds(pid)
            row["ragged"]["cores"] = {
                name: (taken[name] - before[name]) / row["ragged"]["seconds"] for name in before
            }
        if "documents" in workloads:
            asked(address, documents(vocab_size, length, seed=100))
            known = counted(address)
            # at first, programs for shared prefixes may still compile in the background
            times = [asked(address, documents(vocab_size, length, seed)) for seed in DOCUMENT_SEEDS]
            row["documents"] = {key: median(each[key] for each in times) for key in times[0]}
            row["documents"]["all_seconds"] = [each["seconds"] for each in times]
            hits, queries = (new - old for new, old in zip(counted(address), known, strict=True))
            row["documents"]["hit_share"] = hits / queries
    return row


def main() -> None:
    """Runs each model with all engines and with one, and writes the report after each."""
    parser = report_parser("replica_speed", (__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(REQUESTS), choices=list(REQUESTS))
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--engines", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--serve", nargs=3, metavar=("MODEL", "POLICY", "ENGINES"))
    args = parser.parse_args()
    if args.serve:
        model, policy, engines = args.serve
        serve(model, policy, int(engines))
        return
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    report |= {"clients": CLIENTS, "rows": []}
    for model in args.models:
        rows = []
        for engines in args.engines:
            rows.append(measured(model, args.policy, engines, args.workloads))
            report["rows"].append(rows[-1])
            print(json.dumps(rows[-1]), flush=True)
            write_report(args.json, report)
        one = next((row for row in rows if row["engines"] == 1), None)
        if one is not None and "ragged" in args.workloads:
            for row in rows:
                row["over_one"] = rate(row) / rate(one)
                print(model, row["engines"], "over one:", row["over_one"], flush=True)
            write_report(args.json, report)


def rate(row: dict[str, Any]) -> float:
    """Returns the tokens per second of ragged outputs."""
    return row["ragged"]["tokens_per_second"]


if __name__ == "__main__":
    main()
