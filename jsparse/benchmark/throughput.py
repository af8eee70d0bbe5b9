"""Runs a workload through an engine and reports its throughput and latency.

A workload is a list of prompts with output lengths and arrival times. Prompts are random tokens,
and outputs have exactly the requested length.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jsparse.benchmark.workload import WorkloadRequest
from jsparse.engine.core import Engine
from jsparse.engine.outputs import RequestOutput
from jsparse.runtime.request import requests
from jsparse.runtime.sampling_params import SamplingParams

PERCENTILES = (50, 90, 99)


def run(
    engine: Engine, workload: Sequence[WorkloadRequest], **sampling: Any
) -> list[RequestOutput]:
    """Serves a workload, each request at its arrival time; outputs are in the order of requests.

    Decoding is greedy unless options of SamplingParams specify otherwise. The engine's clock must
    be `time.perf_counter`.
    """
    sampling = {"temperature": 0, "ignore_eos": True} | sampling
    options = [SamplingParams(max_tokens=each.tokens, **sampling) for each in workload]
    rows = [each.ids for each in workload]
    waiting = [
        (each.arrival, nth, request)
        for nth, (each, request) in enumerate(
            zip(workload, requests(engine.params, rows, options, engine.policy), strict=True)
        )
    ]
    waiting.sort(reverse=True)
    for _, _, request in waiting:
        engine.check(request)
    done: dict[str, RequestOutput] = {}
    began = time.perf_counter()
    while len(done) < len(workload):
        now = time.perf_counter() - began
        while waiting and waiting[-1][0] <= now:
            arrival, nth, request = waiting.pop()
            engine.add(request, request_id=f"{nth}", arrived=began + arrival)
        if engine.idle and waiting:
            time.sleep(waiting[-1][0] - now)
        for served in engine.step():
            if served.finished:
                done[served.request_id] = served.output()
    return [done[f"{nth}"] for nth in range(len(workload))]


def measure(engine: Engine, workload: Sequence[WorkloadRequest], **sampling: Any) -> dict[str, Any]:
    """Serves a workload as `run` does; returns throughput and latency, with units in their names.

    TTFT: from arrival to the first token; ITL: between tokens as the host sees them; TPOT: mean per
    token after the first. `host_ms_per_step`: computing time of the engine's thread, split into
    `plan_seconds`, `dispatch_seconds` and `results_seconds`, which include waiting;
    `decode_ms_per_step`: after the last prompt's prefill. `accepted_share` is None if nothing was
    drafted.
    """
    before = vars(engine.counters).copy()
    cpu, began = time.thread_time(), time.perf_counter()
    outs = run(engine, workload, **sampling)
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
    done = {name: count - before[name] for name, count in vars(engine.counters).items()}
    times = [out.metrics.token_times for out in outs]
    new = sum(len(each) for each in times)
    prompt = sum(len(each.ids) for each in workload)
    ttft = [out.metrics.time_to_first_token or 0.0 for out in outs]
    itl = [b - a for each in times for a, b in pairwise(each)]
    tpot = [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1]
    steps, drafted = max(done["decode_steps"], 1), done["draft_tokens"]
    return {
        "requests": len(workload),
        "seconds": seconds,
        "requests_per_second": len(workload) / seconds,
        "output_tokens": new,
        "output_tokens_per_second": new / seconds,
        "total_tokens_per_second": (prompt + new) / seconds,
        "prompt_tokens": prompt,
        "computed_prompt_tokens": done["prefill_tokens"],
        "decode_steps": done["decode_steps"],
        "rows_per_step": done["row_steps"] / steps,
        "host_ms_per_step": 1e3 * cpu / steps,
        **{name: done[name] for name in ("plan_seconds", "dispatch_seconds", "results_seconds")},
        "decode_ms_per_step": _undisturbed_ms(max(times, key=lambda each: each[0])),
        "accepted_share": done["accepted_tokens"] / drafted if drafted else None,
        "attended_fraction": _mean([out.outputs[0].attended_fraction for out in outs]),
        **_percentiles("ttft", ttft),
        **_percentiles("itl", itl),
        **_percentiles("tpot", tpot),
    }


def _undisturbed_ms(times: Sequence[float]) -> float | None:
    """Returns the time per token of an output, without the program that ran with its prefill."""
    moments, tokens = np.unique(times, return_counts=True)
    if len(moments) < 3:
        return None
    return 1e3 * float((moments[-1] - moments[1]) / tokens[2:].sum())


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_p{p}_ms": 1e3 * float(np.percentile(seconds, p)) if seconds else None
        for p in PERCENTILES
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
