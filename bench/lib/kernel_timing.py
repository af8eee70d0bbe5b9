"""Times small programs with two clocks: the host's, over many calls, and the device's, by profile.

A program is a jitted function of several consecutive calls. Under the profiler, every program runs
after a lead, a sum over more bytes than any cache holds: the host is then ahead of the device, and
the program's inputs are cold.
"""

import gzip
import itertools
import json
import re
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.lib.subprocesses import spread

LEAD_BYTES = 2_000_000_000
LONGEST = 0.3  # maximum seconds of one measurement
PAUSE_SECONDS, PAUSE_US = 0.04, 15e3  # between programs; the minimum pause seen in a trace


class TimedProgram(NamedTuple):
    """A program: `run` dispatches `calls` calls and returns their results without waiting."""

    run: Callable[[], Any]
    calls: int


class Event(NamedTuple):
    """A kernel or a copy on the device, in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


def lead(nbytes: int = LEAD_BYTES) -> TimedProgram:
    """Returns a program that reads `nbytes` bytes once."""
    x = jnp.ones(nbytes // 2, jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    jax.block_until_ready(total(x))
    return TimedProgram(lambda: total(x), 1)


def wall(program: TimedProgram, calls: int, repeats: int) -> dict[str, float]:
    """Returns the microseconds per call on the host's clock, over `repeats` measurements.

    Each measurement waits once, after `calls` calls or the number that fits in LONGEST.
    """
    jax.block_until_ready(program.run())
    began = time.perf_counter()
    jax.block_until_ready(program.run())
    once = time.perf_counter() - began
    programs, times = max(min(-(-calls // program.calls), int(LONGEST / once)), 1), []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(programs):
            result = program.run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / programs / program.calls * 1e6)
    return spread(times)


def profile(
    programs: Sequence[TimedProgram], before: TimedProgram, repeats: int
) -> list[dict[str, Any]]:
    """Profiles programs that have run before; see `summary`.

    Returns:
        A dict for `before` itself, then one for each program. All are empty if the profile has no
        device, as on a CPU; {"profile_error": …} if a program's kernels cannot be distinguished
        from the others'.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    folder = tempfile.mkdtemp()
    try:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(before.run())  # the first kernel in a profile may be delayed
            time.sleep(PAUSE_SECONDS)
            for program in (None, *programs):
                for _ in range(repeats):
                    result = before.run()
                    result = (result, program.run()) if program else result
                jax.block_until_ready(result)
                time.sleep(PAUSE_SECONDS)
        events = read_trace(Path(folder))
    finally:
        shutil.rmtree(folder)
    if not events:
        return [{} for _ in range(len(programs) + 1)]
    runs = segments(events, PAUSE_US)[1:]
    if len(runs) != len(programs) + 1 or len(runs[0]) % repeats:
        error = (
            f"kernels ran {[len(run) for run in runs]} at a time, for {len(programs) + 1} programs"
        )
        return [{"profile_error": error} for _ in range(len(programs) + 1)]
    skip = len(runs[0]) // repeats
    found = [summary(runs[0], repeats, 1, skip=0)]
    return found + [
        summary(run, repeats, p.calls, skip) for run, p in zip(runs[1:], programs, strict=True)
    ]


def read_trace(folder: Path) -> list[Event]:
    """Returns all events on the streams of the first GPU, ordered by start."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        entries = json.load(file)["traceEvents"]
    meta = [e for e in entries if e.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    lines = {(e["pid"], e["tid"]): e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    streams = {
        line
        for line, name in lines.items()
        if "GPU:0" in processes.get(line[0], "") and "Stream" in name
    }
    found = [
        Event(e["name"], e["ts"], e.get("dur", 0.0))
        for e in entries
        if e.get("ph") == "X" and (e["pid"], e.get("tid")) in streams
    ]
    return sorted(found, key=lambda event: event.start)


def traced[Result](run: Callable[[], Result]) -> tuple[Result, list[Event]]:
    """Calls a function and waits for its result; also returns the events on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = jax.block_until_ready(run())
        return result, read_trace(Path(folder))


def step_kernels(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Summarises `steps` decode steps in microseconds per step.

    Returns:
        span: from the start of the first kernel to the end of the last.
        busy: the time during which any kernel ran.
        launches: the number of kernels.
        kernels: for each name, without XLA's number: launches, total microseconds, and the median
            of one; most time first.
    """
    if not events:
        return {}
    busy, end = 0.0, events[0].start
    for event in events:
        busy += max(event.end - max(event.start, end), 0.0)
        end = max(end, event.end)
    names = defaultdict(list)
    for event in events:
        names[re.sub(r"[_.]\d+$", "", event.name)].append(event.duration)
    return {
        "span": (end - events[0].start) / steps,
        "busy": busy / steps,
        "launches": len(events) / steps,
        "kernels": {
            name: {
                "launches": len(times) / steps,
                "us": sum(times) / steps,
                "each": statistics.median(times),
            }
            for name, times in sorted(names.items(), key=lambda item: -sum(item[1]))
        },
    }


def segments(events: Sequence[Event], pause: float) -> list[list[Event]]:
    """Splits the events wherever nothing ran for longer than `pause`."""
    parts: list[list[Event]] = []
    end = 0.0
    for event in events:
        if not parts or event.start - end > pause:
            parts.append([])
        parts[-1].append(event)
        end = max(end, event.end)
    return parts


def summary(events: Sequence[Event], repeats: int, calls: int, skip: int) -> dict[str, Any]:
    """Summarises `repeats` runs of `calls` calls in microseconds per call.

    Each run follows `skip` events of the lead. XLA may run a part of all calls once, or the first
    call's in a different way: a run that does not divide into equal calls is summarised as a whole.

    Returns:
        device: from the start of one call's first kernel to that of the next call's, including
            launch gaps; to the end of its last kernel if a run is one call. For unequal calls, the
            time of a run divided by their number.
        kernels: the sum of its kernels' durations.
        launches: the number of these kernels.
        by_kernel: both for each name, most time first.
        order: name and duration of each kernel of a call, in order; missing if calls differ in
            number. If XLA runs the first call's in a different way, its names are outvoted.
    """
    each, left = divmod(len(events), repeats)
    if left or each <= skip:
        found = f"{len(events)} kernels in {repeats} runs of {calls} calls"
        return {"profile_error": f"{found}, {skip} of each the lead's"}
    runs = [events[run * each + skip : (run + 1) * each] for run in range(repeats)]
    names = defaultdict(list)
    for event in itertools.chain(*runs):
        names[event.name].append(event.duration)
    by_kernel = {
        name: {"us": statistics.median(times), "launches": round(len(times) / repeats / calls, 2)}
        for name, times in sorted(names.items(), key=lambda item: -sum(item[1]))
    }
    if (each - skip) % calls:
        whole = [(max(event.end for event in run) - run[0].start) / calls for run in runs]
        sums = [sum(event.duration for event in run) / calls for run in runs]
        launches = round((each - skip) / calls, 2)
        found = {"device": spread(whole), "kernels": spread(sums), "launches": launches}
        return found | {"by_kernel": by_kernel}
    launches = (each - skip) // calls
    device, kernels, order = [], [], [[] for _ in range(launches)]
    for own in runs:
        starts = [event.start for event in own[::launches]]
        device += [after - start for start, after in pairwise(starts)] or [
            max(e.end for e in own) - starts[0]
        ]
        for call in range(calls):
            kernels.append(
                sum(event.duration for event in own[call * launches : (call + 1) * launches])
            )
        for nth, event in enumerate(own):
            order[nth % launches].append(event)
    return {
        "device": spread(device),
        "kernels": spread(kernels),
        "launches": launches,
        "by_kernel": by_kernel,
        "order": [
            {
                "name": statistics.mode(event.name for event in at),
                "us": statistics.median(event.duration for event in at),
            }
            for at in order
        ],
    }
