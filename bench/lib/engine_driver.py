"""Sends the same requests to jsparse's engine and to vLLM's, and times their tokens alike.

It imports neither engine, so that it runs in an environment that has only one of them.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

# steps that are not timed after all rows have begun, and the steps of a timed block
SKIPPED, BLOCK = 16, 64
Request = tuple[list[int], int]  # a prompt's ids, and the number of tokens to generate
Moment = tuple[float, int]  # when the host received tokens, and how many it then had in all


@dataclass(frozen=True)
class Case:
    """Requests that arrive together.

    Attributes:
        name: the case's name on the command line.
        shape: the model's, "8b" or "135m".
        count: the number of requests.
        prompt, new: tokens per prompt and per completion.
        varied: lengths are drawn evenly from this share around `prompt` and `new`.
        at_once: the most requests in the engine at a time; None: all.
        runs: how often it is timed, after `warm_up`.
    """

    name: str
    shape: str
    count: int
    prompt: int
    new: int
    varied: float = 0.0
    at_once: int | None = None
    runs: int = 1

    def requests(self, vocab_size: int) -> list[Request]:
        """Draws random prompts and the lengths of their completions."""
        rng = random.Random(1)

        def length(mean: int) -> int:
            return round(mean * rng.uniform(1 - self.varied, 1 + self.varied))

        return [
            (rng.choices(range(10, vocab_size), k=length(self.prompt)), length(self.new))
            for _ in range(self.count)
        ]


CASES = {
    case.name: case
    for case in (
        Case("one", "8b", 1, 130_900, 512),
        Case("four", "8b", 4, 130_900, 512),
        Case("sixteen", "8b", 16, 30_720, 512),
        Case("varied", "8b", 16, 20_000, 2_000, varied=0.15, at_once=8),
        Case("small", "135m", 64, 1_024, 512, runs=3),
    )
}
# of each shape: the context length and the most rows of an engine
ENGINE_SIZES = {"8b": (132_096, 16), "135m": (2_048, 64)}


class Served(Protocol):
    """An engine, as the driver uses it."""

    def add(self, name: str, ids: list[int], tokens: int) -> None:
        """Queues a request for greedy decoding that ignores end-of-sequence tokens."""
        ...

    def step(self) -> Mapping[str, int]:
        """Advances all requests; returns the tokens so far of those that got some."""
        ...


def drive(engine: Served, requests: Sequence[Request], at_once: int | None = None) -> list[Any]:
    """Serves requests; returns per request its moments, in seconds since the first arrival."""
    wanted = {f"{nth}": tokens for nth, (_, tokens) in enumerate(requests)}
    moments: dict[str, list[Moment]] = {name: [] for name in wanted}
    waiting, running = list(wanted)[::-1], set[str]()
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < (at_once or len(requests)):
            name = waiting.pop()
            engine.add(name, *requests[int(name)])
            running.add(name)
        counts = engine.step()
        now = time.perf_counter() - began
        for name, count in counts.items():
            moments[name].append((now, count))
            if count >= wanted[name]:
                running.discard(name)
    return list(moments.values())


def step_times(moments: Sequence[Sequence[Moment]]) -> list[float]:
    """Returns the milliseconds per token and row, by blocks of steps in which all rows decode."""
    end = min(each[-1][0] for each in moments)
    last = max(moments, key=lambda each: each[0][0])  # when this row begins, all decode
    inside = [moment for moment in last if moment[0] <= end]
    inside = [moment for moment in inside if moment[1] >= inside[0][1] + SKIPPED]
    found, since = [], inside[:1]
    for now, count in inside:
        before, had = since[0]
        if count - had >= BLOCK:
            found.append(1e3 * (now - before) / (count - had))
            since = [(now, count)]
    return found


def warm_up(case: Case, engine: Served, vocab_size: int) -> None:
    """Runs a case before it is timed: a short form of it if it takes long."""
    requests = case.requests(vocab_size)
    short = [(ids[:512], 12) for ids, _ in requests[:4]]
    drive(engine, short if case.runs == 1 else requests, case.at_once)


def figures(case: Case, engine: Served, vocab_size: int) -> dict[str, Any]:
    """Runs a case; returns its figures, the medians of its runs.

    Returns:
        output_tokens_per_second: of the whole case, its prompts' time included. read_seconds: until
        every request has a token. step_ms: the median, minimum and maximum over blocks of steps
        with all rows; None if requests wait for others.
    """
    requests = case.requests(vocab_size)
    rates, reading, blocks = [], [], []
    for _ in range(case.runs):
        moments = drive(engine, requests, case.at_once)
        tokens = sum(each[-1][1] for each in moments)
        rates.append(tokens / max(each[-1][0] for each in moments))
        reading.append(max(each[0][0] for each in moments))
        blocks += step_times(moments) if case.at_once is None else []
    step = {"median": median(blocks), "min": min(blocks), "max": max(blocks)} if blocks else None
    found = {"output_tokens_per_second": median(rates), "step_ms": step, "steps": len(blocks)}
    found["read_seconds"] = median(reading) if case.at_once is None else None
    return found
