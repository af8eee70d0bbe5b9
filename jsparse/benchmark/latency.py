"""Computes a server's rates and delays from the times at which answers came.

The names are those that `vllm bench serve` writes: TTFT is the time from sending a request to the
first piece of its answer, ITL that between its pieces, E2EL that to its end, and TPOT the mean time
per token behind the first, (E2EL - TTFT) / (tokens - 1). A piece may hold several tokens.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jsparse.benchmark.serve import RequestResult

GOALS = ("ttft", "tpot", "e2el")
"""The delays that a goodput may bound."""

DETAILS = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
    "latencies",
    "queue_times",
)
"""The keys that hold one value for each request."""


def figures(
    answers: Sequence[RequestResult],
    *,
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
    queued: bool = False,
) -> dict[str, Any]:
    """Returns the figures of a run by the names that `vllm bench serve` gives them.

    Only complete answers count towards rates and delays; `failed` is the number of the others. A
    figure without measurements is None.

    Args:
        answers: the results of `drive`; at least one.
        percentiles: those of each delay, from 0 to 100.
        goodput: the longest a delay may take, in milliseconds, by names of GOALS. `request_goodput`
            is the number of requests per second that keep all of them; None if there is none.
        queued: whether to report the time that requests waited for others to end before they were
            sent, as `client_queue_time`. No other delay contains it.
    """
    done = [answer for answer in answers if not answer.error]
    began = min(answer.due for answer in answers)
    seconds = max(answer.ended for answer in answers) - began
    inputs = sum(answer.prompt_tokens for answer in done)
    outputs = sum(answer.output_tokens for answer in done)
    delays = {
        "ttft": [_ttft(answer) for answer in done],
        "tpot": [_tpot(answer) for answer in done if answer.output_tokens > 1],
        "itl": [gap for answer in done for gap in _gaps(answer)],
        "e2el": [_e2el(answer) for answer in done],
    }
    if queued:
        delays["client_queue_time"] = [answer.sent - answer.due for answer in done]
    kept = sum(_keeps(answer, goodput or {}) for answer in done)
    rate = {
        "request_throughput": len(done),
        "request_goodput": kept if goodput else None,
        "output_throughput": outputs,
        "total_token_throughput": inputs + outputs,
    }
    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        **{
            name: None if count is None or not seconds else count / seconds
            for name, count in rate.items()
        },
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": _max_concurrency(done),
        **{
            key: value
            for name in delays
            for key, value in _summary(name, delays[name], percentiles)
        },
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "start_times": [answer.sent - began for answer in answers],
        "ttfts": [0.0 if answer.error else _ttft(answer) for answer in answers],
        "itls": [[] if answer.error else _gaps(answer) for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
        "latencies": [_e2el(answer) for answer in answers],
        "queue_times": [answer.sent - answer.due for answer in answers],
    }


def _ttft(answer: RequestResult) -> float:
    return answer.times[0] - answer.sent


def _e2el(answer: RequestResult) -> float:
    return answer.ended - answer.sent


def _tpot(answer: RequestResult) -> float:
    """Returns the time per token behind the first; 0 if there is none."""
    return (_e2el(answer) - _ttft(answer)) / max(answer.output_tokens - 1, 1)


def _gaps(answer: RequestResult) -> list[float]:
    return [after - before for before, after in pairwise(answer.times)]


def _keeps(answer: RequestResult, goodput: Mapping[str, float]) -> bool:
    took = {"ttft": _ttft, "tpot": _tpot, "e2el": _e2el}
    return all(1e3 * took[name](answer) <= maximum for name, maximum in goodput.items())


def _busiest_second(done: Sequence[RequestResult]) -> float:
    """Returns the most tokens in one second, counted from when the first request was sent.

    The tokens of an answer are spread evenly over its pieces.
    """
    began = min((answer.sent for answer in done), default=0.0)
    seconds: dict[int, float] = {}
    for answer in done:
        for time in answer.times:
            second = math.floor(time - began)
            seconds[second] = seconds.get(second, 0.0) + answer.output_tokens / len(answer.times)
    return max(seconds.values(), default=0.0)


def _max_concurrency(done: Sequence[RequestResult]) -> int:
    """Returns the most requests under way; one that ends makes room for one sent just then."""
    events = sorted([(answer.sent, 1) for answer in done] + [(answer.ended, -1) for answer in done])
    return int(max(np.cumsum([change for _, change in events]), default=0))


def _summary(
    name: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> list[tuple[str, float | None]]:
    averages = {"mean": np.mean, "median": np.median, "std": np.std}
    values = {which: float(of(seconds)) if seconds else None for which, of in averages.items()}
    for p in percentiles:
        values[f"p{p:g}"] = float(np.percentile(seconds, p)) if seconds else None
    return [
        (f"{which}_{name}_ms", None if value is None else 1e3 * value)
        for which, value in values.items()
    ]
