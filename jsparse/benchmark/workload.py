"""Draws workloads: the lengths of prompts and outputs, and arrival times."""

import math
from dataclasses import dataclass

import numpy as np

from jsparse.hyper_parameters import whole_number


@dataclass(frozen=True)
class WorkloadRequest:
    """A prompt, the number of tokens to generate, and its arrival in seconds."""

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
) -> list[WorkloadRequest]:
    """Returns requests with random prompts.

    Lengths are numbers or pairs (minimum, maximum) to draw from log-uniformly; `input_len` counts
    tokens after the shared prefix of all prompts. `request_rate` is per second, with exponential
    times between requests; None: all at once.

    Raises:
        ValueError: an argument is out of range.
    """
    whole_number("num_prompts", num_prompts, 1)
    whole_number("shared_prefix", shared_prefix, 0)
    rng = np.random.default_rng(seed)
    prefix = rng.integers(vocab_size, size=shared_prefix).tolist()
    inputs = _log_uniform(rng, "input_len", input_len, num_prompts)
    outputs = _log_uniform(rng, "output_len", output_len, num_prompts)
    times = arrivals(rng, num_prompts, math.inf if request_rate is None else request_rate)
    return [
        WorkloadRequest(prefix + rng.integers(vocab_size, size=own).tolist(), new, arrival)
        for own, new, arrival in zip(inputs, outputs, times, strict=True)
    ]


def arrivals(rng: np.random.Generator, count: int, request_rate: float) -> list[float]:
    """Returns the arrival times of requests in seconds: a Poisson process."""
    if not request_rate > 0:
        raise ValueError(f"request_rate={request_rate!r}: must be a number above 0")
    return np.cumsum(rng.exponential(1 / request_rate, count)).tolist()


def _log_uniform(
    rng: np.random.Generator, name: str, lengths: int | tuple[int, int], count: int
) -> list[int]:
    minimum, maximum = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    whole_number(name, minimum, 1)
    whole_number(name, maximum, minimum)
    drawn = np.exp(rng.uniform(np.log(minimum), np.log(maximum + 1), count))
    return np.clip(drawn.astype(int), minimum, maximum).tolist()
