"""Runs a workload through an engine and reports its rates and delays.

A workload is a list of prompts with lengths of answers and times of arrival. Prompts are random
tokens and answers have the length that is asked for, whatever the model would say.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jsparse.engine.core import Engine
from jsparse.engine.outputs import RequestOutput
from jsparse.policy import whole_number
from jsparse.request import SamplingParams, requests

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Asked:
    """Holds one request of a workload.

    Attributes:
        ids: the prompt.
        tokens: the number of tokens to generate.
        arrival: when it comes, in seconds from the beginning.
    """

    ids: list[int]
    tokens: int
    arrival: float = 0.0


def random_workload(
    vocab_size: int,
    *,
    num_prompts: int,
    input_len: int | tuple[int, int],
    output_len: int | tuple[int, int],
    shared_prefix: int = 0,
    request_rate: float | None = None,
    seed: int = 0,
) -> list[Asked]:
    """Returns requests with random prompts.

    Args:
        vocab_size: the number of token ids to draw from.
        num_prompts: the number of requests.
        input_len: the number of tokens per prompt, after the shared prefix; a pair (least, most)
            draws log-uniformly.
        output_len: the number of tokens per answer, likewise.
        shared_prefix: the number of tokens with which all prompts begin.
        request_rate: requests per second, with exponential times between them; None is all at once.
        seed: the random seed.

    Raises:
        ValueError: an argument is out of its range.
    """
    whole_number("num_prompts", num_prompts, 1)
    whole_number("shared_prefix", shared_prefix, 0)
    if request_rate is not None and not request_rate > 0:
        raise ValueError(f"request_rate={request_rate!r}: must be a number above 0")
    rng = np.random.default_rng(seed)
    prefix = rng.integers(vocab_size, size=shared_prefix).tolist()
    inputs = _lengths(rng, "input_len", input_len, num_prompts)
    outputs = _lengths(rng, "output_len", output_len, num_prompts)
    waits = np.zeros(num_prompts)
    if request_rate is not None:
        waits = rng.exponential(1 / request_rate, num_prompts)
    return [
        Asked(prefix + rng.integers(vocab_size, size=own).tolist(), new, arrival)
        for own, new, arrival in zip(inputs, outputs, np.cumsum(waits).tolist(), strict=True)
    ]


def run(engine: Engine, workload: Sequence[Asked]) -> list[RequestOutput]:
    """Serves a workload, each request when its time has come; outputs in the order of requests.

    The engine's clock must be `time.perf_counter`.
    """
    options = [
        SamplingParams(temperature=0, max_tokens=each.tokens, ignore_eos=True) for each in workload
    ]
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


def measure(engine: Engine, workload: Sequence[Asked]) -> dict[str, Any]:
    """Serves a workload and returns its rates and delays, with the units in their names.

    TTFT is the time from a request's arrival to its first token, ITL that between its tokens as the
    host sees them, TPOT the mean time per token behind the first. `host_ms_per_step` is the time
    that the engine's thread computes, without waiting, per decode step; `decode_ms_per_step` is the
    time per step once the last prompt has been read.
    """
    before = vars(engine.counters).copy()
    cpu, began = time.thread_time(), time.perf_counter()
    outs = run(engine, workload)
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
    done = {name: count - before[name] for name, count in vars(engine.counters).items()}
    times = [out.metrics.token_times for out in outs]
    new = sum(len(each) for each in times)
    prompt = sum(len(each.ids) for each in workload)
    ttft = [out.metrics.time_to_first_token or 0.0 for out in outs]
    itl = [b - a for each in times for a, b in pairwise(each)]
    tpot = [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1]
    steps = max(done["decode_steps"], 1)
    return {
        "requests": len(workload),
        "seconds": seconds,
        "requests_per_second": len(workload) / seconds,
        "output_tokens": new,
        "output_tokens_per_second": new / seconds,
        "total_tokens_per_second": (prompt + new) / seconds,
        "prompt_tokens": prompt,
        "computed_prompt_tokens": done["read_tokens"],
        "decode_steps": done["decode_steps"],
        "rows_per_step": done["row_steps"] / steps,
        "host_ms_per_step": 1e3 * cpu / steps,
        "decode_ms_per_step": _undisturbed_ms(max(times, key=lambda each: each[0])),
        "attended_fraction": _mean([out.outputs[0].attended_fraction for out in outs]),
        **_percentiles("ttft", ttft),
        **_percentiles("itl", itl),
        **_percentiles("tpot", tpot),
    }


def _lengths(
    rng: np.random.Generator, name: str, given: int | tuple[int, int], count: int
) -> list[int]:
    least, most = given if isinstance(given, tuple) else (given, given)
    whole_number(name, least, 1)
    whole_number(name, most, least)
    drawn = np.exp(rng.uniform(np.log(least), np.log(most + 1), count))
    return np.clip(drawn.astype(int), least, most).tolist()


def _undisturbed_ms(times: Sequence[float]) -> float | None:
    """Returns the time per token of an answer, without the program that ran beside its prompt."""
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
