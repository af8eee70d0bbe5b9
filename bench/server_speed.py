"""How much does a server cost: the engine's workloads over HTTP, next to the engine alone?

Llama 3.1 8B's shape, random bf16 weights, random prompts, a client in its own process. Each part
runs on one engine twice, first alone and then over HTTP, with other prompts of the same lengths:

    queued      64 prompts of 30,720 tokens at once, 256 new each
    ragged      256 prompts of 2,048, new tokens log-uniform in 32 to 2,048
    arrivals    Poisson, at 60 % of prefill throughput, prompts log-uniform in 1K to 32K, 256 new
    beside      prompts of 128K that arrive together with prompts of 1K
    small       SmolLM2's shape: 64 prompts of 1,024, 512 new each

Counts are divided by --shorten; the report records the divisor.

    python -m bench.server_speed queued ragged --policies dense --json build/server.json
"""

import asyncio
import dataclasses
import gc
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.engine_speed import (
    LONG,
    NEW,
    POLICIES,
    SERVED,
    SMALL,
    Bench,
    arriving_workload,
    beside_workload,
    first_tokens,
    queued_workload,
    ragged_workload,
    random_model,
    show,
    small_bench,
    small_workload,
)
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import run_child, write_report

if TYPE_CHECKING:
    import jsparse
    from jsparse.benchmark.workload import WorkloadRequest
    from jsparse.models.checkpoint import Params

PARTS = ("queued", "ragged", "arrivals", "beside", "small")
# the longest prompt and output of parts that have their own engines
LONGEST = {"beside": LONG + NEW, "small": SMALL}


def measured(bench: Bench, engine: "jsparse.AsyncEngine", address: str, part: str) -> dict:
    """Runs a part alone and over HTTP; `engine` serves at `address`."""
    from jsparse.benchmark.throughput import measure, run

    inner, noted = engine.engine, {}
    if part == "arrivals":
        workload, noted = arriving_workload(bench, inner)
    else:
        make = {
            "queued": queued_workload,
            "ragged": ragged_workload,
            "beside": beside_workload,
            "small": small_workload,
        }
        workload = make[part](bench)
    # the engine's own thread sleeps until a request arrives
    if part == "beside":
        outs = run(inner, workload)
        alone = first_tokens([out.metrics.time_to_first_token or 0.0 for out in outs])
    else:
        alone = measure(inner, workload)
    made = over_http(address, others(workload, bench.params.config.vocab_size))
    if made["failed"]:
        raise RuntimeError(f"{made['failed']} requests failed: {set(made['errors'])}")
    if part == "beside":
        made |= first_tokens(made["ttfts"])
    served = {name: value for name, value in made.items() if not isinstance(value, list)}
    row = noted | {"engine": alone, "server": served}
    if part in ("queued", "ragged", "small"):
        row["share_of_engine"] = alone["seconds"] / made["duration"]
    return row


def others(workload: "Sequence[WorkloadRequest]", vocab_size: int) -> "list[WorkloadRequest]":
    """Returns requests of the same lengths, with prompts that are not in the cache."""
    return [
        dataclasses.replace(each, ids=[(token + 1) % vocab_size for token in each.ids])
        for each in workload
    ]


def over_http(address: str, workload: "Sequence[WorkloadRequest]") -> dict[str, Any]:
    """Sends requests from another process; returns the figures of their responses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps([dataclasses.asdict(each) for each in workload]))
        return run_child("bench.server_speed", ["--client", address, str(path)])


@dataclasses.dataclass
class Answer:
    """A record of a streamed response; times are in seconds of one clock.

    Attributes:
        due: the scheduled time of the request.
        times: the arrival time of each part with a token or its text.
        prompt_tokens, output_tokens: the lengths that the server counts.
        error: a description of the failure, or "".
    """

    due: float
    times: list[float] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def client(address: str, path: Path) -> dict[str, Any]:
    """Sends the requests in a file to a server, each at its time of arrival."""
    import httpx

    workload = json.loads(path.read_text())

    async def ask(server: httpx.AsyncClient, model: str, request: dict, due: float) -> Answer:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(due - clock(), 0.0))
        body = {"model": model, "prompt": request["ids"], "max_tokens": request["tokens"]}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        answer = Answer(due)
        try:
            async with server.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        answer.error += line if response.status_code != 200 else ""
                        continue
                    part = json.loads(line.removeprefix("data: "))
                    answer.error += str(part.get("error") or "")
                    if any(each["text"] or not each["finish_reason"] for each in part["choices"]):
                        answer.times.append(clock())
                    if usage := part.get("usage"):
                        answer.prompt_tokens = usage["prompt_tokens"]
                        answer.output_tokens = usage["completion_tokens"]
        except (httpx.HTTPError, LookupError) as error:
            answer.error += repr(error)
        if not (answer.times and answer.output_tokens):
            answer.error = answer.error or "the answer is empty"
        return answer

    async def drive() -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as server:
            model = (await server.get("/v1/models")).json()["data"][0]["id"]
            began = asyncio.get_running_loop().time()
            return await asyncio.gather(
                *(ask(server, model, each, began + each["arrival"]) for each in workload)
            )

    return figures(asyncio.run(drive()))


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns the figures of a run; rates and delays exclude failed requests."""
    done = [answer for answer in answers if not answer.error]
    delays = {
        "ttft": [answer.times[0] - answer.due for answer in done],
        "itl": [gap for answer in done for gap in np.diff(answer.times)],
        "e2el": [answer.times[-1] - answer.due for answer in done],
    }
    seconds = max((answer.times[-1] for answer in done), default=0.0)
    seconds -= min(answer.due for answer in answers)
    tokens = sum(answer.output_tokens for answer in done)
    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": sum(answer.prompt_tokens for answer in done),
        "total_output_tokens": tokens,
        "output_throughput": tokens / seconds if done else None,
        **{
            f"p{p}_{name}_ms": 1e3 * float(np.percentile(times, p))
            for name, times in delays.items()
            for p in (50, 90, 99)
            if times
        },
        "ttfts": delays["ttft"],
        "errors": [answer.error for answer in answers],
    }


@contextmanager
def serving(engine: "jsparse.AsyncEngine") -> Iterator[str]:
    """Serves an engine at any port of loopback, until it is closed; yields the address."""
    import uvicorn

    from jsparse.server.app import make_app
    from jsparse.server.front import Options
    from jsparse.server.run import configured, listen
    from jsparse.server.service import Service

    service = Service(Options("random"))
    service.begin(engine)
    listening = listen("127.0.0.1", 0)
    config = configured(make_app(service))
    server = uvicorn.Server(config)

    def work() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve([listening]))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        service.close()


def with_words(params: "Params") -> "Params":
    """Returns a model with a word for each token, so that a server can convert them to text."""
    import tokenizers

    from jsparse.models.tokenizer import Tokenizer

    words = {f"w{nth}": nth for nth in range(params.config.vocab_size)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return dataclasses.replace(params, tokenizer=Tokenizer(core))


def main() -> None:
    """Runs the parts for each policy and writes the report after each."""
    parser = report_parser("server_speed", (__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"among {', '.join(PARTS)}")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--shorten", type=int, default=4, help="divides the numbers of requests")
    parser.add_argument("--slots", type=int, default=64, help="maximum decode batch size")
    parser.add_argument("--client", metavar="ADDRESS", help="send the requests in a file instead")
    args = parser.parse_args()
    if args.client:
        print(json.dumps(client(args.client, Path(args.parts[0]))))
        return
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        raise SystemExit(f"error: parts {unknown}: must be among {list(PARTS)}")
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    report |= {"shorten": args.shorten, "slots": args.slots, "rows": []}
    bench = Bench(random_model(), args.shorten, args.slots)
    for policy in args.policies:
        for longest in (SMALL, SERVED, LONG + NEW):
            parts = [part for part in args.parts if LONGEST.get(part, SERVED) == longest]
            if parts:
                own = small_bench() if longest == SMALL else bench
                run_parts(own, policy, longest, parts, report, args.json)


def run_parts(
    bench: Bench,
    policy: str,
    longest: int,
    parts: Sequence[str],
    report: dict[str, Any],
    path: Path | None,
) -> None:
    """Runs the parts of engines with one `max_model_len`; adds their rows to the report."""
    import jsparse

    options = {"max_num_seqs": bench.slots, "max_model_len": longest, "layer_stats": True}
    engine = jsparse.AsyncEngine(with_words(bench.params), policy, prepare=True, **options)
    # so that no measurement includes compilation
    engine.engine.prepare(("sampled",), all_rows=True)
    with serving(engine) as address:
        for part in parts:
            began = time.perf_counter()
            row: dict[str, Any] = {"part": part, "policy": policy}
            row |= measured(bench, engine, address, part)
            row["wall_seconds"] = time.perf_counter() - began
            report["rows"].append(row)
            show(row)
            write_report(path, report)
    del engine
    gc.collect()


if __name__ == "__main__":
    main()
