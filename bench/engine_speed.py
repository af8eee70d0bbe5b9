"""What does the engine make of queues, shared documents, ragged answers and arrivals?

Llama 3.1 8B's shape, random bf16 weights, random prompts. Workloads:

    queued      64 prompts of 30,720 tokens at once, 256 new each; beside it the same in static
                batches of generate's session, as many rows as fit
    document    64 questions of 128 tokens on one document of 30,720, 256 new; with the prefix cache
                and, on a few questions, without
    ragged      256 prompts of 2,048, new tokens log-uniform in 32 to 2,048; beside it static
                batches of 64 in their order
    arrivals    Poisson, at 60 % of what prefill can do, prompts log-uniform in 1K to 32K, 256 new
    beside      prompts of 128K that arrive beside prompts of 1K
    chunks      one prompt of 32,768 read in chunks of each size: tokens per second
    start       seconds to compile all programs, without and with the compilation cache

Counts are divided by --shorten, so that a run of all fits in minutes; the report says by how much.

    python -m bench.engine_speed queued document --policies dense --json build/engine.json
"""

import time
from collections.abc import Callable
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.llama_8b import LLAMA_8B, boundary_constants
from bench.lib.subprocesses import write_report

TWILIGHT = "twilight(quest(budget=7680, bounds_dtype='uint8'), p=0.95)"
POLICIES = ("dense", TWILIGHT)
PARTS = ("queued", "document", "ragged", "arrivals", "beside", "chunks", "start")
DOCUMENT, QUESTION, NEW, LONG = 30_720, 128, 256, 131_072
CHUNKS = (512, 1024, 2048, 4096, 8192)


class Bench:
    """Holds the model, and one engine at a time.

    Attributes:
        shorten: what the counts of requests are divided by.
    """

    def __init__(self, params: Any, shorten: int, slots: int) -> None:
        """Prepares to measure a model with engines of `slots` slots."""
        self.params, self.shorten, self._slots = params, shorten, slots
        self._engine: Any = None

    def engine(self, policy: str, max_model_len: int, **options: Any) -> Any:
        """Returns a new engine; the one before is let go first."""
        from jsparse.engine.core import Engine

        self._engine = None
        self._engine = Engine(
            self.params,
            policy,
            max_num_seqs=self._slots,
            max_model_len=max_model_len,
            prepare=True,
            **options,
        )
        return self._engine

    def count(self, requests: int) -> int:
        """Returns the number of requests that this run makes instead of `requests`."""
        return max(2, requests // self.shorten)

    def workload(self, **options: Any) -> Any:
        """Returns random requests."""
        from jsparse.benchmark.workload import random_workload

        return random_workload(self.params.config.vocab_size, **options)

    def static(self, workload: Any, policy: str, rows: int) -> float:
        """Returns the seconds of static batches of `rows`, once compiled."""
        import jsparse

        def run(batch: Any) -> float:
            options = [
                jsparse.SamplingParams(temperature=0, max_tokens=each.tokens, ignore_eos=True)
                for each in batch
            ]
            longest = max(len(each.ids) + each.tokens for each in workload)
            began = time.perf_counter()
            jsparse.generate(
                self.params,
                [each.ids for each in batch],
                sampling=options,
                policy=policy,
                max_length=longest,
            )
            return time.perf_counter() - began

        self._engine = None  # frees its memory
        batches = [workload[at : at + rows] for at in range(0, len(workload), rows)]
        for batch in {len(batch): batch for batch in batches}.values():
            run(batch)
        return sum(map(run, batches))


def queued(bench: Bench, policy: str) -> dict[str, Any]:
    """Measures requests that all come at once, and of equal lengths."""
    from jsparse.benchmark.throughput import measure

    workload = bench.workload(num_prompts=bench.count(64), input_len=DOCUMENT, output_len=NEW)
    engine = bench.engine(policy, DOCUMENT + NEW, enable_prefix_caching=False)
    rows = engine.scheduler.pool.size // engine.sizes.groups_for(DOCUMENT + NEW)
    measured = measure(engine, workload)
    del engine
    rows = min(rows, len(workload))
    return measured | {"static_rows": rows, "static_seconds": bench.static(workload, policy, rows)}


def document(bench: Bench, policy: str) -> dict[str, Any]:
    """Measures many questions on one document."""
    from jsparse.benchmark.throughput import measure

    def questions(count: int) -> Any:
        return bench.workload(
            num_prompts=count, input_len=QUESTION, output_len=NEW, shared_prefix=DOCUMENT
        )

    engine = bench.engine(policy, DOCUMENT + QUESTION + NEW)
    measured = measure(engine, questions(64))
    del engine
    few = bench.count(64)
    engine = bench.engine(policy, DOCUMENT + QUESTION + NEW, enable_prefix_caching=False)
    apart = measure(engine, questions(few))
    return measured | {"without_cache": apart, "without_cache_questions": few}


def ragged(bench: Bench, policy: str) -> dict[str, Any]:
    """Measures answers of very different lengths."""
    from jsparse.benchmark.throughput import measure

    workload = bench.workload(
        num_prompts=bench.count(256), input_len=2048, output_len=(32, 2048), seed=1
    )
    engine = bench.engine(policy, 4096, enable_prefix_caching=False)
    measured, rows = measure(engine, workload), engine.sizes.num_slots
    del engine
    return measured | {"static_rows": rows, "static_seconds": bench.static(workload, policy, rows)}


def arrivals(bench: Bench, policy: str) -> dict[str, Any]:
    """Measures delays where requests come at random times."""
    from jsparse.benchmark.throughput import measure

    engine = bench.engine(policy, 32768 + 256, enable_prefix_caching=False)
    one = bench.workload(num_prompts=1, input_len=8192, output_len=1)
    measure(engine, one)
    alone = measure(engine, bench.workload(num_prompts=1, input_len=8192, output_len=1, seed=2))
    # the mean of the lengths below is 9.2K tokens
    rate = 0.6 * 8192 / alone["seconds"] / 9160
    workload = bench.workload(
        num_prompts=bench.count(128), input_len=(1024, 32768), output_len=256, request_rate=rate
    )
    return measure(engine, workload) | {"request_rate": rate, "alone_8k_seconds": alone["seconds"]}


def beside(bench: Bench, policy: str) -> dict[str, Any]:
    """Measures short prompts that arrive while long ones are read."""
    from dataclasses import replace

    from jsparse.benchmark.throughput import run
    from jsparse.benchmark.workload import Asked

    engine = bench.engine(policy, LONG + 128, enable_prefix_caching=False)
    long = bench.workload(num_prompts=2, input_len=LONG - 1024, output_len=64)
    short = bench.workload(
        num_prompts=bench.count(64), input_len=1024, output_len=64, request_rate=4.0, seed=3
    )
    first: list[Asked] = [replace(each, arrival=0.0) for each in long]
    outs = run(engine, [*first, *short])
    waits = sorted(1e3 * (out.metrics.time_to_first_token or 0) for out in outs[len(first) :])
    return {
        "short_requests": len(short),
        "short_ttft_p50_ms": waits[len(waits) // 2],
        "short_ttft_p99_ms": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
        "long_ttft_ms": [1e3 * (out.metrics.time_to_first_token or 0) for out in outs[:2]],
    }


def chunks(bench: Bench, policy: str) -> dict[str, Any]:
    """Measures how fast one prompt is read in chunks of each size."""
    from jsparse.benchmark.throughput import measure

    measured = {}
    for size in CHUNKS:
        engine = bench.engine(policy, 32768 + 64, ladder=((0, size),), enable_prefix_caching=False)
        seconds = [
            measure(engine, bench.workload(num_prompts=1, input_len=32768, output_len=1, seed=seed))
            for seed in range(4)
        ]
        # the first has the tokenizer's and the allocator's first calls
        measured[size] = 32768 / sorted(each["seconds"] for each in seconds[1:])[1]
        del engine
    return {"tokens_per_second": measured}


def start(bench: Bench, policy: str) -> dict[str, Any]:
    """Measures how long an engine takes to be ready."""
    began = time.perf_counter()
    engine = bench.engine(policy, 32768)
    return {"seconds": time.perf_counter() - began, "programs": engine.programs.compiled}


MEASURES: dict[str, Callable[[Bench, str], dict[str, Any]]] = {
    "queued": queued,
    "document": document,
    "ragged": ragged,
    "arrivals": arrivals,
    "beside": beside,
    "chunks": chunks,
    "start": start,
}


def main() -> None:
    """Runs the parts for each policy and writes the report after each."""
    parser = report_parser("engine_speed", (__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"among {', '.join(PARTS)}")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--shorten", type=int, default=4, help="divide counts of requests by this")
    parser.add_argument("--slots", type=int, default=64, help="rows that decode together")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        raise SystemExit(f"error: parts {unknown}: must be among {list(PARTS)}")
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    report |= {"shorten": args.shorten, "slots": args.slots, "rows": []}
    bench = Bench(random_model(), args.shorten, args.slots)
    for policy in args.policies:
        for part in args.parts:
            row = {"part": part, "policy": policy} | MEASURES[part](bench, policy)
            report["rows"].append(row)
            shown = {name: value for name, value in row.items() if isinstance(value, float)}
            print(
                part, policy, {name: round(value, 3) for name, value in shown.items()}, flush=True
            )
            write_report(args.json, report)


def random_model() -> Any:
    """Returns the 8B shape with random weights."""
    import jax.numpy as jnp

    from jsparse.models.checkpoint import Params
    from jsparse.models.transformer import random_weights

    weights = random_weights(LLAMA_8B, jnp.bfloat16)
    return Params(weights, LLAMA_8B, None, {}, "llama-3.1-8b", constants=boundary_constants())


if __name__ == "__main__":
    main()
