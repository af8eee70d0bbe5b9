"""Measures the time of a decode step on this device, next to dense attention and a floor.

The cache is full of random K and V (jsparse.benchmark.random_cache), tokens are chosen greedily and
fed back on the device, and the steps run in the loop of `jsparse.generate`. The floor is the time
in which the device's memory delivers the bytes that a step must read: all weights once (only the
tokens' rows of an input embedding that the output does not share, and the experts of random
choices), and the K and V that the policy attends to. It includes neither a policy's reads for
selection nor computation. For a model spread over devices, bytes are per device.
"""

import logging
import statistics
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jsparse.benchmark.memory_floor import memory_bandwidth, read_bytes
from jsparse.benchmark.random_cache import full_session
from jsparse.benchmark.random_model import random_model
from jsparse.builder import dense
from jsparse.cache import CacheSpec
from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params
from jsparse.models.config_files import checked_path, read_config
from jsparse.models.formats import plan_files
from jsparse.models.hub import locate
from jsparse.models.quantized import all_q8_0, plain
from jsparse.models.weight_plan import parse_weights
from jsparse.policies.expressions import as_policy
from jsparse.policy import AnyPolicy, Policy
from jsparse.runtime import capacity
from jsparse.runtime.admission import STEPS_PER_PROGRAM, admit
from jsparse.runtime.compilation import clock
from jsparse.runtime.sampling import greedy
from jsparse.runtime.session import StepResult

PAGE_SIZE = 16
# steps per iteration: enough on a GPU that starting the first is negligible
STEPS_ON_GPU, STEPS_ELSEWHERE = 104, 4
IN_FLIGHT = 4  # programs


def measure(
    params: Params,
    policies: Sequence[AnyPolicy | str],
    *,
    contexts: Sequence[int] = (4096,),
    batches: Sequence[int] = (1,),
    num_iters: int = 5,
    num_iters_warmup: int = 1,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """Times decode steps of every policy at every context and batch size, after dense attention.

    Args:
        params: the model; random weights give the same times, except for policies that choose how
            many tokens they attend to.
        policies: policies or their expressions; dense() comes first and need not be named.
        contexts: tokens in the cache of each row after the last step.
        batches: the batch sizes.
        num_iters: timed iterations, each of 104 steps on a GPU and 4 elsewhere.
        num_iters_warmup: untimed iterations before them; more if services need them to come due.
        bandwidth: the bandwidth of the device's memory in bytes/s; None: measure it.

    Returns:
        bandwidth (bytes/s), bandwidth_measured, steps_per_iteration, num_iters and results, a dict
        per measurement: policy, policy_that_runs, batch, context, warm_up_steps, ms (median, min
        and max, per step), over_dense, tokens_per_second, attended and read (shares of the tokens),
        weight_bytes and attended_bytes (read by a step), floor_ms, over_floor and kernels (by op).

    Raises:
        ValueError: an argument is out of range, a policy is invalid, or the cache does not fit the
            model or the memory.
    """
    for name, value in (("num_iters", num_iters), ("num_iters_warmup", num_iters_warmup)):
        whole_number(name, value, 1)
    if bandwidth is not None and not (isfinite(bandwidth) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth}: must be a number of bytes/s above 0")
    chosen = [dense(), *(each for each in map(as_policy, policies) if each is not dense())]
    steps = STEPS_ON_GPU if jax.default_backend() == "gpu" else STEPS_ELSEWHERE
    sizes = [(batch, context) for batch in batches for context in contexts]
    runs = [
        [_plan(params, policy, *size, steps, num_iters, num_iters_warmup) for policy in chosen]
        for size in sizes
    ]
    bytes_per_second = memory_bandwidth() if bandwidth is None else bandwidth
    results: list[dict[str, Any]] = []
    for of_size in runs:
        rows = [_measured(params, each) for each in of_size]
        for row in rows:
            row["over_dense"] = rows[0]["ms"]["median"] / row["ms"]["median"]
            row["weight_bytes"] = read_bytes(params, row["batch"])
            read = row["weight_bytes"] + row["attended_bytes"]
            row["floor_ms"] = 1e3 * read / bytes_per_second
            row["over_floor"] = row["ms"]["median"] / row["floor_ms"]
        results += rows
    return {
        "bandwidth": bytes_per_second,
        "bandwidth_measured": bandwidth is None,
        "steps_per_iteration": steps,
        "num_iters": num_iters,
        "results": results,
    }


def time_steps(
    params: Params, policy: AnyPolicy | str, *, batch: int, context: int, num_iters: int = 5
) -> dict[str, Any]:
    """Times one policy as `measure` does; its result lacks over_dense, floor_ms and over_floor."""
    steps = STEPS_ON_GPU if jax.default_backend() == "gpu" else STEPS_ELSEWHERE
    return _measured(params, _plan(params, as_policy(policy), batch, context, steps, num_iters, 1))


def shaped(
    model: str,
    *,
    dtype: Any = None,
    weights: str | None = None,
    revision: str | None = None,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> Params:
    """Returns a model with random weights, reading only headers.

    Formats are those that loading the files would give; a Hub id's are numbers, or Q8_0 if asked.
    """
    config = read_config(model, revision=revision)
    dtype = jnp.dtype(dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32"))
    option = parse_weights(weights, dtype)
    path = checked_path(locate(model, revision, weights=False), model)
    planned = plan_files(path, option, dtype, tensor_parallel_size)
    if planned is None:
        form_at = all_q8_0 if option == "q8_0" else plain
    else:
        form_at = {each.weight.path: each.form for each in planned}.get
    ranks = tensor_parallel_size
    made = random_model(config, dtype, model, form_at=form_at, tensor_parallel_size=ranks)
    return replace(made, kv_cache_dtype=kv_cache_dtype)


class _Run(NamedTuple):
    """A planned measurement; `tokens` are in the cache before the first step."""

    original: AnyPolicy
    policy: Policy
    spec: CacheSpec
    context: int
    tokens: int
    warm_up: int
    steps: int
    num_iters: int


def _plan(
    params: Params,
    original: AnyPolicy,
    batch: int,
    context: int,
    steps: int,
    num_iters: int,
    num_iters_warmup: int,
) -> _Run:
    """Checks that a measurement is possible, and returns it."""
    for name, value in (("batch", batch), ("context", context)):
        whole_number(name, value, 1)
    limit = params.config.max_position_embeddings
    if context > limit:
        raise ValueError(f"context={context}: must be at most {limit}, the model's maximum")
    # a program that maintenance cuts short shifts the following ones, which then end later
    further = (num_iters + 1) * STEPS_PER_PROGRAM
    spec = capacity.cache_spec(params, [[]] * batch, context, None, PAGE_SIZE)
    spec = spec._replace(num_pages=spec.num_pages + -(-further // PAGE_SIZE))
    policy = admit(params, original, spec).policy
    warm_up = _warm_up_steps(policy, steps, num_iters, num_iters_warmup)
    new = warm_up + num_iters * steps
    if context <= new:
        raise ValueError(
            f"context={context}: must be at least {new + 1}, for {warm_up} steps of warm-up and "
            f"{num_iters * steps} that are timed, which end there"
        )
    return _Run(original, policy, spec, context, context - new, warm_up, steps, num_iters)


def _measured(params: Params, run: _Run) -> dict[str, Any]:
    """Times the steps of one policy; each iteration ends when the device has finished it."""
    session, kernels = full_session(params, run.policy, run.spec, run.tokens), {}
    limit = run.spec.capacity - run.tokens

    def choose(arguments: Any, nth: Any, logits: Any, active: Any) -> Any:
        # a new function each time, so that the step is retraced and logs its kernels
        return greedy(arguments, nth, logits, active)

    results = few_in_flight(session.steps(choose, (), limits=[limit] * run.spec.batch))

    def advance(count: int) -> tuple[float, StepResult]:
        """Runs at least `count` steps; returns the seconds per step and the last result."""
        began = clock()
        result = next(results)
        done = len(result.tokens)
        while done < count:
            result = next(results)
            done += len(result.tokens)
        jax.block_until_ready(result)
        return (clock() - began) / done, result

    with capacity.exhaustion(run.spec):
        jax.block_until_ready(next(results))
        with _noted(kernels):
            advance(run.warm_up)
        timed = [advance(run.steps) for _ in range(run.num_iters)]
    results.close()
    ms = [1e3 * seconds for seconds, _ in timed]
    stats = timed[-1][1].stats
    assert stats is not None
    attended, read = (float(share[-1].mean()) for share in stats)
    batch, median = run.spec.batch, statistics.median(ms)
    return {
        "policy": run.original.name,
        "policy_that_runs": run.policy.name,
        "batch": batch,
        "context": run.context,
        "warm_up_steps": run.warm_up,
        "ms": {"median": median, "min": min(ms), "max": max(ms)},
        "tokens_per_second": 1e3 * batch / median,
        "attended": attended,
        "read": read,
        "attended_bytes": round(attended * batch * run.context * run.spec.token_bytes),
        "kernels": kernels,
    }


def few_in_flight(results: Iterable[StepResult]) -> Generator[StepResult]:
    """Yields results of programs while keeping few in flight, as when a client reads the tokens.

    On several devices of a CPU, more than 32 would deadlock.
    """
    running = deque[jax.Array]()
    for result in results:
        running.append(result.tokens)
        if len(running) > IN_FLIGHT:
            running.popleft().block_until_ready()
        yield result


def _warm_up_steps(policy: Policy, steps: int, num_iters: int, num_iters_warmup: int) -> int:
    """Returns whole iterations of steps that compile each service that will come due."""
    minimum = num_iters_warmup * steps
    periods = policy.services.every.values()
    due = [every for every in periods if every <= minimum + num_iters * steps]
    return -(-max([minimum, *due]) // steps) * steps


@contextmanager
def _noted(kernels: dict[str, list[str]]) -> Iterator[None]:
    """Records which backends run which ops in programs traced in this context."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            op, backend = (str(record.__dict__.get(name, "")) for name in ("op", "backend"))
            if op and backend not in kernels.setdefault(op, []):
                kernels[op].append(backend)

    logger, handler = logging.getLogger("jsparse.kernels"), Notes()
    level, propagate = logger.level, logger.propagate
    logger.propagate = propagate and logger.isEnabledFor(logging.DEBUG)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
