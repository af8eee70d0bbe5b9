"""Times jobs and returns the rows of bench.kernels."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from bench.lib.kernel_cases import HEAD_DIM, KV_HEADS, AttentionCase
from bench.lib.kernel_programs import Contender, Job, attention_op, cache, in_turn, inputs, random
from bench.lib.kernel_timing import TimedProgram, profile, wall
from bench.lib.llama_8b import READ_BANDWIDTH

BUS_PAGES = 65536  # 268 MB


class Settings(NamedTuple):
    """Numbers of timings per program.

    Attributes:
        calls: the calls of one measurement on the host's clock.
        repeats: the number of such measurements.
        runs: the number of runs under the profiler.
    """

    calls: int = 200
    repeats: int = 5
    runs: int = 8


class Bandwidth(NamedTuple):
    """Bytes per second of the device's memory and of the bus, measured in this run.

    Without a GPU both are the same.
    """

    memory: float
    bus: float


def bandwidth(before: TimedProgram, nbytes: int, settings: Settings, *, on_gpu: bool) -> Bandwidth:
    """Measures the bandwidths, that of memory with `before`, which reads `nbytes` of it."""
    (found,) = profile([], before, settings.runs)
    memory = (
        nbytes
        / (found.get("kernels") or wall(before, settings.calls, settings.repeats))["median"]
        * 1e6
    )
    if not on_gpu:
        return Bandwidth(memory, memory)
    device = jax.local_devices()[0]
    here, there = (
        SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host")
    )
    far = jax.device_put(random(0, (BUS_PAGES, 16, HEAD_DIM)), there)
    copy = TimedProgram(lambda: jax.device_put(far, here), 1)
    return Bandwidth(
        memory, far.nbytes / wall(copy, settings.calls, settings.repeats)["median"] * 1e6
    )


def warm(job: Job) -> None:
    """Compiles the job's programs.

    A program that fails here fails again when it is timed, and is reported there.
    """
    made = job.build()
    for contender in job.contenders.values():
        try:
            jax.block_until_ready(contender(*made).run())
        except Exception:
            continue


def warm_grid(cases: Sequence[AttentionCase], contender: Contender) -> None:
    """Compiles one case of each of the grid's shapes; the others share its program."""
    for case in {tuple(_shape(case).values()): case for case in reversed(cases)}.values():
        try:
            jax.block_until_ready(contender(cache(case), [inputs(case, 0)]).run())
        except Exception:
            continue


def job_rows(
    job: Job, before: TimedProgram, rate: Bandwidth, settings: Settings
) -> list[dict[str, Any]]:
    """Returns a row for each contender: its times, or the reason why it has none."""
    made, programs = job.build(), {}
    rows: dict[str, dict[str, Any]] = {}
    for name, contender in job.contenders.items():
        try:
            programs[name] = contender(*made)
            rows[name] = {"wall": wall(programs[name], settings.calls, settings.repeats)}
        except Exception as error:
            rows[name] = _failure(error)
    timed = [name for name, row in rows.items() if "wall" in row]
    found = _profiles([programs[name] for name in timed], before, settings.runs)
    for name, more in zip(timed, found, strict=True):
        rows[name] |= more
    case = {"case": job.case, "bytes": job.bytes, "crosses": job.crosses, **_shape(job.attention)}
    return [_finished({**case, "contender": name, **row}, rate) for name, row in rows.items()]


def grid_rows(
    cases: Sequence[AttentionCase],
    contender: Contender,
    before: TimedProgram,
    rate: Bandwidth,
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each case; each of its calls runs alone and cold.

    `before` runs ahead of every call and fills the cache with other data. Cases of one shape are
    adjacent and share the cache and one profile.
    """
    for _, group in groupby(cases, key=_shape):
        same = list(group)
        layer = cache(same[0])
        programs = [contender(layer, [inputs(case, 0)]) for case in same]
        try:
            jax.block_until_ready([program.run() for program in programs])
            found = _profiles(programs, before, settings.runs)
        except Exception as error:
            found = [_failure(error)] * len(same)
        for case, row in zip(same, found, strict=True):
            fraction = 1.0 if case.dense == "all" else case.tokens / case.context
            sparse = KV_HEADS - int(case.dense_heads().sum()) // case.batch
            heads = {
                "sparse_heads": sparse,
                "fraction": fraction,
            }  # of each row; their attended tokens
            row = {"case": case.name, **heads, "bytes": case.bytes, "crosses": "memory", **row}
            yield _finished({**_shape(case), **row}, rate)


def grid_contender(implementation: str) -> Contender:
    """Returns the contender that runs all cases of the grid."""
    return in_turn(attention_op(AttentionCase("", 1, 16), implementation))


def _shape(case: AttentionCase | None) -> dict[str, int]:
    return (
        {} if case is None else {"heads": case.heads, "batch": case.batch, "context": case.context}
    )


def _profiles(
    programs: Sequence[TimedProgram], before: TimedProgram, runs: int
) -> list[dict[str, Any]]:
    try:
        return profile(programs, before, runs)[1:]
    except Exception as error:
        return [{"profile_error": f"{type(error).__name__}: {str(error)[:300]}"}] * len(programs)


def _failure(error: Exception) -> dict[str, str]:
    """Returns the row of a failed case, so that the others keep theirs.

    An op raises ValueError for unsupported arguments.
    """
    kind = "refused" if isinstance(error, ValueError) else "error"
    return {kind: f"{type(error).__name__}: {str(error)[:400]}"}


def _finished(row: dict[str, Any], rate: Bandwidth) -> dict[str, Any]:
    """Adds floors; `us` is the device's time, or the host's without a profile."""
    row["floor_us"] = row["bytes"] / getattr(rate, row["crosses"]) * 1e6
    row["floor_at_4400_us"] = row["bytes"] / READ_BANDWIDTH * 1e6
    us = row.get("device") or row.get("wall")
    if us:
        row |= {"us": us, "over_floor": us["median"] / row["floor_us"]}
    return row
