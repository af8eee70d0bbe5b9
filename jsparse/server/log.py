"""Logs the server's start, end and speed, and finished requests.

It logs nothing of prompts and completions.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from jsparse.engine.async_engine import AsyncEngine
from jsparse.engine.core import Engine
from jsparse.engine.request_state import RequestState
from jsparse.server.metrics import kv_cache_usage

EVERY_SECONDS = 10
logger = logging.getLogger("jsparse.server")


def show(level: str, name: str = "") -> None:
    """Writes jsparse's log, from this level on, to standard error with time and process name."""
    handler = logging.StreamHandler(sys.stderr)
    shown = f"%(asctime)s {name}{': ' if name else ''}%(message)s"
    handler.setFormatter(logging.Formatter(shown, "%H:%M:%S"))
    logs = logging.getLogger("jsparse")
    logs.addHandler(handler)
    logs.setLevel(level.upper())
    logs.propagate = False


def level() -> str:
    """Returns the level of jsparse's log."""
    return logging.getLevelName(logging.getLogger("jsparse").getEffectiveLevel())


def of_request(state: RequestState) -> str:
    """Returns the line about a request that has ended, or whose client has left."""
    metrics = state.metrics
    times = list(metrics.token_times)
    parts = [f"{len(state.ids)} prompt tokens"]
    if cached := max(seq.cached_tokens for seq in state.seqs):
        parts[0] += f" ({cached} cached)"
    parts.append(f"{len(times)} new")
    if times:
        parts.append(f"first after {times[0] - metrics.arrived:.2f} s")
        if len(times) > 1 and times[-1] > times[0]:
            parts.append(f"{(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s")
    ends = sorted({builder.finish or "abort" for builder in state.builders})
    return f"{state.request_id}: {', '.join(parts)}, {'/'.join(ends)}"


class EngineSnapshot(NamedTuple):
    """An engine's counters at a time, in seconds."""

    time: float
    read: int
    new: int


def seen(engine: Engine) -> EngineSnapshot:
    """Returns the engine's counters now."""
    return EngineSnapshot(
        time.monotonic(), engine.counters.prefill_tokens, engine.counters.new_tokens
    )


def of_speed(engine: Engine, before: EngineSnapshot, now: EngineSnapshot) -> str:
    """Returns the line about the engine's work between two times; "": it has done nothing."""
    scheduler = engine.scheduler
    running = len(scheduler.begun)
    waiting = len(scheduler.waiting)
    if before[1:] == now[1:] and not running and not waiting:
        return ""
    seconds = max(now.time - before.time, 1e-9)
    return (
        f"{(now.read - before.read) / seconds:.1f} prompt tokens/s, "
        f"{(now.new - before.new) / seconds:.1f} new tokens/s, {running} running, "
        f"{waiting} waiting, KV cache {kv_cache_usage(engine):.1%} in use"
    )


async def log_speed(engine_now: Callable[[], AsyncEngine | None]) -> None:
    """Logs the engine's throughput every ten seconds, unless it was idle.

    `engine_now` returns the engine, or None before it is loaded.
    """
    before: EngineSnapshot | None = None
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        if (loaded := engine_now()) is None:
            continue
        engine = loaded.engine
        now = seen(engine)
        if line := of_speed(engine, before or now, now):
            logger.info(line)
        before = now
