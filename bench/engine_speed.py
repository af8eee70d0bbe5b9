"""How fast is the engine with queues, shared documents, ragged outputs and arrivals?

Llama 3.1 8B's shape, random bf16 weights, random prompts. Workloads:

    start       seconds until all programs are ready, and from the compilation cache
    queued      64 prompts of 30,720 tokens at once, 256 new each; if all fit, the same again, from
                the prefix cache; for comparison static batches of generate's session, with the
                maximum number of rows
    eight       the same of 8 prompts
    document    64 questions of 128 tokens on one document of 30,720, 256 new; others on the same,
                then some for which each row attends to it separately; for comparison fewer
                questions, each on its own document
    ragged      256 prompts of 2,048, new tokens log-uniform in 32 to 2,048; for comparison static
                batches of 64 in their order
    arrivals    Poisson, at 60 % of prefill throughput, prompts log-uniform in 1K to 32K, 256 new
    beside      prompts of 128K that arrive together with prompts of 1K
    chunks      one prompt of 32,768 prefilled in chunks of each size: tokens per second
    small       SmolLM2's shape: 64 prompts of 1,024, 512 new each, greedy and sampled
                (temperature 1, top_p 0.95)
    answers     64 prompts of 2,048 tokens, 8,192 new each, with 20 GB for K and V; half the prompts
                if the policy keeps all of them, since the metric is tokens per second
    sixteen     16 prompts of 2,048 tokens, 1,024 new; for comparison one static batch
    many        SmolLM2's shape: 2,000 requests of 64 to 1,024 tokens, 1 to 64 new; memory in use on
                device and host after each quarter

Counts are divided by --shorten, so that a complete run takes minutes; the report records the
divisor. Each row has the peak memory of device and host since the process started.

    python -m bench.engine_speed queued document --policies dense --json build/engine.json
"""

import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.llama_8b import LLAMA_8B, boundary_constants
from bench.lib.subprocesses import write_report

if TYPE_CHECKING:
    from jsparse.benchmark.workload import WorkloadRequest

TWILIGHT = "twilight(quest(budget=7680, bounds_dtype='uint8'), p=0.95)"
POLICIES = ("dense", TWILIGHT)
DOCUMENT, QUESTION, PROMPT, NEW = 30_720, 128, 2048, 256
LONG = 131_072 - NEW  # the model's 128K include the generated tokens
# stall budget of decoding in servers, in milliseconds
MAX_STALL_MS = 200.0
# the engine's max_model_len in most parts, and with the small model
SERVED, SMALL = 32_768 + 256, 2048
MANY = 2000
# tokens whose K and V take 20 GB, and new tokens of the long outputs
SCARCE, LONG_ANSWER = 152_576, 8192
CHUNKS = (512, 1024, 2048, 8192)


class Bench:
    """The model, and one engine at a time.

    Attributes:
        shorten: divides the numbers of requests.
        slots: the maximum decode batch size.
        max_stall_ms: the stall budget of decoding when requests arrive.
        decode_rows: the batch sizes of decode programs; None: the engine's own.
    """

    def __init__(
        self,
        params: Any,
        shorten: int,
        slots: int,
        max_stall_ms: float = MAX_STALL_MS,
        decode_rows: Sequence[int] | None = None,
    ) -> None:
        """Sets up measurements of a model with engines of `slots` slots."""
        self.params, self.shorten, self.slots = params, shorten, slots
        self.max_stall_ms, self.decode_rows = max_stall_ms, decode_rows
        self._held: tuple[Any, Any] = None, None

    def engine(self, policy: str, max_model_len: int | None = None, **options: Any) -> Any:
        """Returns an engine, the last one if it is the same; otherwise that one is released first.

        All its programs are compiled, so that no measurement includes compilation.
        """
        asked = (policy, max_model_len or SERVED, *options.items())
        if self._held[0] != asked:
            self.release()
            self._held = asked, self.new_engine(policy, asked[1], **options)
            if options.get("prepare", True):
                self._held[1].prepare(("sampled",), all_rows=True)
        return self._held[1]

    def new_engine(self, policy: str, max_model_len: int = SERVED, **options: Any) -> Any:
        """Returns an engine."""
        from jsparse.engine.core import Engine
        from jsparse.engine.options import EngineOptions

        own = {"max_num_seqs": self.slots, "decode_rows": self.decode_rows}
        options = {"prepare": True} | own | options
        return Engine(self.params, policy, EngineOptions(max_model_len=max_model_len, **options))

    def release(self) -> None:
        """Releases the engine's memory."""
        self._held = None, None
        gc.collect()

    def served(self, policy: str, max_model_len: int | None = None) -> Any:
        """Returns an engine in which prefill stalls decoding only briefly."""
        return self.engine(policy, max_model_len, max_stall_ms=self.max_stall_ms)

    def count(self, requests: int) -> int:
        """Returns the number of requests in this run that replaces `requests`."""
        return max(2, requests // self.shorten)

    def workload(self, **options: Any) -> Any:
        """Returns random requests."""
        from jsparse.benchmark.workload import random_workload

        return random_workload(self.params.config.vocab_size, **options)

    def static(self, policy: str, workload: Any, rows: int) -> dict[str, Any]:
        """Times static batches of `rows`, as `generate` runs them, without compilation."""
        self.release()
        batches = [workload[at : at + rows] for at in range(0, len(workload), rows)]
        for batch in {len(batch): batch for batch in batches}.values():
            self._batch(policy, batch, warm=True)
        made = [self._batch(policy, batch) for batch in batches]
        return {
            "static_rows": rows,
            "static_seconds": sum(seconds for seconds, _ in made),
            "static_ms_per_step": statistics.median(step for _, step in made),
        }

    def _batch(self, policy: str, batch: Any, *, warm: bool = False) -> tuple[float, float]:
        """Returns a batch's seconds, and the median milliseconds per step of its programs.

        A warm-up prefills two chunks, which compiles everything, and decodes a few tokens.
        """
        from jsparse.policies.expressions import parse
        from jsparse.runtime import capacity, chunk_attention
        from jsparse.runtime.sampling import greedy
        from jsparse.runtime.session import Session

        rows, limits = [each.ids for each in batch], [each.tokens for each in batch]
        spec = capacity.cache_spec(self.params, rows, limits, None, 16)
        session = Session(self.params, parse(policy), spec)
        if warm:
            few = 2 * chunk_attention.chunk_tokens(spec)
            rows = [ids[:few] for ids in rows]
            limits = [min(limit, 18) for limit in limits]
        began = time.perf_counter()
        session.prefill(rows)
        moments, tokens = [], []
        for result in session.steps(greedy, (), limits=limits):
            made = result.tokens.block_until_ready() if len(moments) > 1 else result.tokens
            moments.append(time.perf_counter())
            tokens.append(len(made))
        steps = [
            1e3 * (after - before) / count
            for before, after, count in zip(moments[1:], moments[2:], tokens[2:], strict=False)
            if count == max(tokens)
        ]
        return moments[-1] - began, statistics.median(steps) if steps else float("nan")


# a part's measurement, and the requests and rows to run in static batches
Measurement = tuple[dict[str, Any], tuple[Any, int] | None]


def queued(bench: Bench, policy: str) -> Measurement:
    """Measures requests of equal lengths that all arrive at once.

    If all fit in the pool, they are sent a second time, when the cache has their prompts: then all
    rows decode together.
    """
    return _queued(bench, policy, queued_workload(bench))


def eight(bench: Bench, policy: str) -> Measurement:
    """Measures eight such requests, for any divisor of counts."""
    few = bench.workload(num_prompts=8, input_len=DOCUMENT, output_len=NEW)
    return _queued(bench, policy, few)


def _queued(bench: Bench, policy: str, workload: "list[WorkloadRequest]") -> Measurement:
    from jsparse.benchmark.throughput import measure

    engine = bench.engine(policy)
    rows = engine.scheduler.pool.size // engine.sizes.groups_for(DOCUMENT + NEW)
    measured = measure(engine, workload)
    if len(workload) <= rows:
        measured["again"] = measure(engine, workload)
    return measured, (workload, min(rows, len(workload)))


def queued_workload(bench: Bench) -> "list[WorkloadRequest]":
    """Returns long prompts of one length."""
    return bench.workload(num_prompts=bench.count(64), input_len=DOCUMENT, output_len=NEW)


def document(bench: Bench, policy: str) -> Measurement:
    """Measures many questions on one document, and fewer on a document each.

    Other questions on the same document follow, and then some for which each row attends to it
    separately.
    """
    from jsparse.benchmark.throughput import measure

    options = {"input_len": QUESTION, "output_len": NEW, "shared_prefix": DOCUMENT}
    engine = bench.engine(policy)
    asked = bench.workload(num_prompts=3 * 64, seed=5, **options)
    measured = measure(engine, asked[:64]) | {"again": measure(engine, asked[64:128])}
    scheduler = engine.scheduler
    sizes, scheduler.sizes = scheduler.sizes, scheduler.sizes._replace(prefix_rows=0)
    measured["each_itself"] = measure(engine, asked[128:])
    scheduler.sizes = sizes
    few = bench.count(32)
    apart = [
        bench.workload(num_prompts=1, seed=seed, **options)[0] for seed in range(100, 100 + few)
    ]
    return measured | {"apart": measure(engine, apart)}, None


def ragged(bench: Bench, policy: str) -> Measurement:
    """Measures outputs of very different lengths."""
    from jsparse.benchmark.throughput import measure

    workload, engine = ragged_workload(bench), bench.engine(policy)
    return measure(engine, workload), (workload, engine.sizes.num_slots)


def ragged_workload(bench: Bench) -> "list[WorkloadRequest]":
    """Returns prompts of one length, with short or long outputs."""
    return bench.workload(
        num_prompts=bench.count(256), input_len=PROMPT, output_len=(NEW // 8, 8 * NEW), seed=1
    )


def arrivals(bench: Bench, policy: str) -> Measurement:
    """Measures latency for requests that arrive at random times."""
    from jsparse.benchmark.throughput import measure

    engine = bench.served(policy)
    workload, rates = arriving_workload(bench, engine)
    return measure(engine, workload) | rates, None


def arriving_workload(
    bench: Bench, engine: Any
) -> "tuple[list[WorkloadRequest], dict[str, float]]":
    """Returns requests that keep an engine 60 % busy with prefill, and the measured rates."""
    from jsparse.benchmark.throughput import measure

    min_length, max_length = DOCUMENT // 30, SERVED - NEW
    probe = max_length // 4
    alone = [
        measure(engine, bench.workload(num_prompts=1, input_len=probe, output_len=1, seed=seed))
        for seed in (11, 12, 13)
    ]
    seconds = statistics.median(each["seconds"] for each in alone)
    mean = (max_length - min_length) / math.log(max_length / min_length)
    rate = 0.6 * probe / seconds / mean
    workload = bench.workload(
        num_prompts=bench.count(128),
        input_len=(min_length, max_length),
        output_len=NEW,
        request_rate=rate,
    )
    return workload, {"request_rate": rate, "alone_seconds": seconds}


def beside(bench: Bench, policy: str) -> Measurement:
    """Measures short prompts that arrive during the prefill of long ones."""
    from jsparse.benchmark.throughput import run

    workload = beside_workload(bench)
    outs = run(bench.served(policy, LONG + NEW), workload)
    return first_tokens([out.metrics.time_to_first_token or 0.0 for out in outs]), None


def beside_workload(bench: Bench) -> "list[WorkloadRequest]":
    """Returns two long prompts that arrive first, and short ones."""
    long = bench.workload(num_prompts=2, input_len=LONG - 1024, output_len=64)
    short = bench.workload(
        num_prompts=bench.count(64), input_len=1024, output_len=64, request_rate=4.0, seed=3
    )
    return [*long, *short]


def first_tokens(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns the times to the first token of `beside_workload`."""
    long, waits = [1e3 * each for each in seconds[:2]], [1e3 * each for each in seconds[2:]]
    return {
        "short_requests": len(waits),
        "short_ttft_p50_ms": float(np.percentile(waits, 50)),
        "short_ttft_p99_ms": float(np.percentile(waits, 99)),
        "long_ttft_ms": long,
    }


def chunks(bench: Bench, policy: str) -> Measurement:
    """Measures the prefill throughput of one prompt in chunks of each size."""
    from jsparse.benchmark.throughput import measure

    measured = {}
    for size in CHUNKS:
        engine = bench.engine(
            *(policy, 32768 + 64),
            ladder=((0, size),),
            max_num_seqs=2,
            prepare=False,
            enable_prefix_caching=False,
            decode_rows=None,
        )
        seconds = [
            measure(engine, bench.workload(num_prompts=1, input_len=32768, output_len=1, seed=seed))
            for seed in range(4)
        ]
        # the first compiles
        measured[size] = 32768 / statistics.median(each["seconds"] for each in seconds[1:])
        del engine  # the next one needs its memory
    return {"tokens_per_second": measured}, None


def small(bench: Bench, policy: str) -> Measurement:
    """Measures many rows of a small model, for which the host is the bottleneck.

    Decoding is greedy, then sampled; once to warm up, then twice, and the slower run counts.
    """
    from jsparse.benchmark.throughput import measure

    bench.release()
    own = small_bench()
    engine = own.engine(policy, SMALL)

    def slower(**sampling: Any) -> dict[str, Any]:
        runs = [measure(engine, small_workload(own, seed), **sampling) for seed in range(3)]
        return max(runs[1:], key=lambda each: each["seconds"])

    return slower() | {"drawn": slower(temperature=1.0, top_p=0.95)}, None


def small_bench() -> Bench:
    """Returns a bench for SmolLM2's shape, with undivided counts."""
    from bench.lib.shapes import SMOLLM2

    return Bench(random_model(SMOLLM2), 1, 64)


def small_workload(bench: Bench, seed: int = 0) -> "list[WorkloadRequest]":
    """Returns one request per slot."""
    return bench.workload(num_prompts=64, input_len=SMALL // 2, output_len=SMALL // 4, seed=seed)


def answers(bench: Bench, policy: str) -> Measurement:
    """Measures long outputs with scarce memory, and the decode batch size."""
    from jsparse.benchmark.throughput import measure

    engine = bench.engine(policy, PROMPT + LONG_ANSWER, kv_cache_tokens=SCARCE)
    few = 64 if engine.policy.evicts else 32
    new = LONG_ANSWER // bench.shorten
    return measure(engine, bench.workload(num_prompts=few, input_len=PROMPT, output_len=new)), None


def sixteen(bench: Bench, policy: str) -> Measurement:
    """Measures a step of sixteen rows, in an engine with programs for that batch size."""
    from jsparse.benchmark.throughput import measure

    own = Bench(bench.params, 1, 16, decode_rows=[16])
    workload = own.workload(num_prompts=16, input_len=PROMPT, output_len=PROMPT // 2)
    bench.release()
    measured = measure(own.engine(policy, 2 * PROMPT), workload)
    return measured, (workload, 16)


def many(bench: Bench, policy: str) -> Measurement:
    """Measures an engine's memory after each quarter of many requests."""
    from jsparse.benchmark.throughput import measure

    bench.release()
    own = small_bench()
    engine = own.engine(policy, SMALL)
    held = []
    for seed in range(4):
        workload = own.workload(
            num_prompts=MANY // 4, input_len=(64, SMALL // 2), output_len=(1, 64), seed=seed
        )
        seconds = measure(engine, workload)["seconds"]
        gc.collect()
        held.append({"seconds": seconds, **memory_now()})
    return {"held": held}, None


def memory_now() -> dict[str, float]:
    """Returns the current memory use of device and host in gigabytes."""
    import jax
    import psutil

    stats = jax.local_devices()[0].memory_stats() or {}
    held = {"device": stats.get("bytes_in_use", 0), "host": psutil.Process().memory_info().rss}
    return {f"{name}_gb": nbytes / 1e9 for name, nbytes in held.items()}


def memory_peaks() -> dict[str, float]:
    """Returns the peak memory of device and host in gigabytes since the process started."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "device_peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
        "host_peak_gb": host / 1e9,
    }


def start(bench: Bench, policy: str) -> Measurement:
    """Measures the startup time of an engine, and again from the compilation cache."""
    from jsparse.machine.folders import cache_folder

    kept = sum(1 for _ in (cache_folder() / "jax").glob("*"))
    measured: dict[str, Any] = {"kept_compilations": kept}
    for name in ("first_seconds", "again_seconds"):
        bench.release()
        began = time.perf_counter()
        engine = bench.new_engine(policy)
        measured |= {name: time.perf_counter() - began, "programs": engine.programs.compiled}
        del engine
    return measured, None


MEASURES: dict[str, Callable[[Bench, str], Measurement]] = {
    "start": start,
    "queued": queued,
    "eight": eight,
    "document": document,
    "ragged": ragged,
    "arrivals": arrivals,
    "beside": beside,
    "chunks": chunks,
    "small": small,
    "answers": answers,
    "sixteen": sixteen,
    "many": many,
}
PARTS = tuple(MEASURES)


def main() -> None:
    """Runs the parts for each policy and writes the report after each."""
    parser = report_parser("engine_speed", (__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"among {', '.join(PARTS)}")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--shorten", type=int, default=4, help="divides the numbers of requests")
    parser.add_argument("--slots", type=int, default=64, help="maximum decode batch size")
    parser.add_argument(
        "--max-stall-ms",
        type=float,
        default=MAX_STALL_MS,
        help="maximum time for which prefill stalls decoding when requests arrive",
    )
    parser.add_argument(
        "--decode-rows",
        type=int,
        nargs="+",
        help="batch sizes of decode programs, up to --slots: fewer sizes start faster",
    )
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        raise SystemExit(f"error: parts {unknown}: must be among {list(PARTS)}")
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    names = ("shorten", "slots", "max_stall_ms", "decode_rows")
    report |= {name: getattr(args, name) for name in names} | {"rows": []}
    bench = Bench(random_model(), args.shorten, args.slots, args.max_stall_ms, args.decode_rows)
    for policy in args.policies:
        static = []
        for part in args.parts:
            row: dict[str, Any] = {"part": part, "policy": policy}
            began = time.perf_counter()
            measured, batches = MEASURES[part](bench, policy)
            row |= measured | {"wall_seconds": time.perf_counter() - began} | memory_peaks()
            static += [(row, *batches)] if batches else []
            report["rows"].append(row)
            show(row)
            write_report(args.json, report)
        # these need the engine's memory
        for row, workload, rows in static:
            made = bench.static(policy, workload, rows)
            row |= made
            show({"part": row["part"], "policy": policy} | made)
            write_report(args.json, report)


def show(row: dict[str, Any]) -> None:
    """Prints the numbers of a row."""
    numbers = {name: round(value, 3) for name, value in row.items() if isinstance(value, float)}
    print(row["part"], row["policy"], numbers, flush=True)
    for name in ("again", "each_itself", "apart", "drawn", "engine", "server"):
        if name in row:
            show({"part": f"{row['part']}, {name}", "policy": row["policy"]} | row[name])


def random_model(shape: Any = LLAMA_8B, ranks: int = 1) -> Any:
    """Returns a model of a shape, with random weights, on `ranks` GPUs."""
    import jax.numpy as jnp

    from jsparse.benchmark.random_model import random_model

    made = random_model(shape, jnp.bfloat16, tensor_parallel_size=ranks)
    return replace(made, constants=boundary_constants() if shape is LLAMA_8B else {})


if __name__ == "__main__":
    main()
