"""Which tiling of each op is fastest on this GPU?

It prints the best and changes nothing. Every choice is timed on the device, on several cases of its
op, beside the op's own choice. The best is the one whose times, each over the least of its case,
have the least geometric mean; it must run on every case.

    python -m bench.tune [--only int4_scores ...] [--json PATH]
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

import jax

from bench.lib import kernel_ops
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.kernel_cases import CASES, AttentionCase, hybrid
from bench.lib.kernel_programs import Job, attention_job
from bench.lib.kernel_timing import TimedProgram, lead, profile
from bench.lib.subprocesses import write_report

RUNS = 4
OWN = "its own"  # choice
PAGED = (
    "dense 128K b1",
    "dense 128K b8",
    "10% of 128K b1",
    "10% of 128K b8",
    "4096 of 128K b1",
    "64..16K of 32K b32",
)
MIXED = ((65536, 1), (65536, 8), (131072, 1), (131072, 4), (131072, 8))  # context, batch
LISTED = ("4096 of 128K b1", "10% of 128K b8", "64..16K of 32K b32", "2% rows of 30K b64")


@dataclass(frozen=True)
class TunedOp:
    """An op that takes a tiling.

    Attributes:
        backend: the module that runs it.
        argument: the name of the tiling in its function.
        choices: returns the tilings to try, given that module, besides the op's own choice.
        jobs: returns new jobs at each call, since programs keep the choice they were compiled with.
        function: the function of that module; None if it has the op's name.
        op: the op that the module belongs to; None if it is listed under its name.
    """

    backend: str
    argument: str
    choices: Callable[[Any], list[Any]]
    jobs: Callable[[], list[Job]]
    function: str | None = None
    op: str | None = None


def _tiles(mosaic: Any) -> list[Any]:
    own = mosaic.schedule.tiles(128)
    blocks = own.blocks
    choices = [own._replace(min_tiles=min_tiles) for min_tiles in (2, 3, 6)] + [
        own._replace(many=many) for many in (4, 6, 12, 20)
    ]
    longest, *others, shortest = own.splits
    cuts = (
        (blocks, *own.splits),
        (longest, *others, 2 * blocks // 11, shortest),
        (*others, shortest),
    )
    choices += [own._replace(splits=cut) for cut in (*cuts, (longest, *others, blocks // 16))]
    choices += [
        own._replace(stages=3),
        own._replace(teams=1, stages=4),
    ]
    return choices


def _cuts(mosaic: Any) -> list[Any]:
    """Returns other cuts of long heads, one or many among short ones, in splits of 132 blocks."""
    own = mosaic.schedule.tiles(128, mixed=True)
    cuts = (
        (66, 33),
        (120, 66, 33),
        (132, 66, 33),
        (160, 80, 33),
        (176, 88, 44),
        (198, 99, 66, 33),
        (240, 120, 66, 33),
    )
    return [
        own._replace(splits=(*(own.blocks * n // 132 for n in cut), own.splits[-1])) for cut in cuts
    ]


def _rows(triton_gpu: Any) -> list[Any]:
    own = triton_gpu.default_tiling(128, 2)
    choices = [own._replace(unit_blocks=blocks) for blocks in (1, 4, 8)]
    choices += [own._replace(programs=2), own._replace(num_warps=8), own._replace(num_stages=2)]
    return [*choices, own._replace(block=32, unit_blocks=4, programs=4, num_stages=4)]


def _bounds(triton_gpu: Any) -> list[Any]:
    own = triton_gpu.default_tiling(128, 2)
    return [
        own._replace(**more)
        for more in ({"ahead": 2}, {"ahead": 4}, {"programs": 8}, {"max_tiles": 8})
    ] + [
        own._replace(block=64, programs=3, num_warps=4, ahead=2),
        own._replace(block=16, programs=8, num_warps=1),
    ]


def _scores(triton_gpu: Any) -> list[Any]:
    cuts = (
        (128, 8, 8, 2, 3),
        (128, 16, 6, 2, 3),
        (128, 32, 8, 2, 2),
        (64, 16, 16, 1, 2),
        (256, 16, 4, 4, 2),
    )
    return [triton_gpu.ScoresTiling(*cut) for cut in cuts]


def _copies(triton_gpu: Any) -> list[Any]:
    return [
        triton_gpu.GatherTiling(size, warps)
        for size in (2048, 4096, 8192, 16384, 32768)
        for warps in (4, 8)
    ]


def _searches(triton_gpu: Any) -> list[Any]:
    own = triton_gpu.SelectTiling()
    changes = [{"few": few} for few in (0, 32, 64)] + [
        {"entries": each, "threads": 64} for each in (32, 128)
    ]
    return [
        own._replace(**some) for some in [*changes, {"threads": 256}, {"threads": 256, "few": 0}]
    ]


def _strips(triton_gpu: Any) -> list[Any]:
    narrow = ((64, 128, 4), (64, 256, 8), (64, 1024, 16))
    wide = ((128, 256, 4), (128, 256, 8), (128, 512, 8), (128, 512, 16))
    whole = ((256, 64, 4), (256, 128, 4), (256, 128, 8), (256, 256, 8), (256, 256, 16))
    return [triton_gpu.CompactTiling(*cut) for cut in (*narrow, *wide, *whole)]


def _attention(names: tuple[str, ...], kernel: str, **changes: Any) -> list[Job]:
    cases = [replace(case, small=False, **changes) for case in CASES if case.name in names]
    return [_by(kernel, case) for case in cases]


def _by(kernel: str, case: AttentionCase) -> Job:
    """Returns the job of a case for one of its kernels."""
    job = attention_job(case, on_gpu=True, max_calls=8)
    return replace(job, contenders={kernel: job.contenders[kernel]})


def _hybrids() -> list[Job]:
    """Returns jobs where 1, 2 or 4 of a row's KV heads have 64K or 128K tokens, the others 4096."""
    cases = [case for case in hybrid(10**12) if case.tokens == 4096 and case.dense in (1, 2, 4)]
    cases = [case for case in cases if (case.context, case.batch) in MIXED]
    named = [
        replace(case, name=f"{case.dense} of {case.context // 1024}K, batch {case.batch}")
        for case in cases
    ]
    return [_by("mosaic", case) for case in named]


def _others(prefix: str) -> list[Job]:
    return [job for job in kernel_ops.jobs(on_gpu=True, max_calls=8) if job.case.startswith(prefix)]


def _selections() -> list[Job]:
    """Returns one job for each rule."""
    return [
        replace(job, case=f"{job.case} {name}", contenders={name: made})
        for job in _others("select")
        for name, made in job.contenders.items()
        if name.startswith("triton")
    ]


OPS = {
    "block_sparse_decode": TunedOp("mosaic", "tiles", _tiles, lambda: _attention(PAGED, "mosaic")),
    "hybrid": TunedOp("mosaic", "tiles", _cuts, _hybrids, op="block_sparse_decode"),
    "token_sparse_decode": TunedOp(
        *("triton_gpu", "tiling", _rows, lambda: _attention(LISTED, "triton", lists="token")),
        function="sparse_decode",
    ),
    "block_sparse_rows": TunedOp(
        *("triton_gpu", "tiling", _rows, lambda: _attention(PAGED, "triton")),
        function="sparse_decode",
        op="token_sparse_decode",
    ),
    "page_bounds": TunedOp("triton_gpu", "tiling", _bounds, lambda: _others("page_bounds")),
    "int4_scores": TunedOp("triton_gpu", "tiling", _scores, lambda: _others("int4_scores")),
    "row_gather": TunedOp("triton_gpu", "tiling", _copies, lambda: _others("gather")),
    "threshold_select": TunedOp("triton_gpu", "tiling", _searches, _selections),
    "compact_pages": TunedOp(
        "triton_gpu", "tiling", _strips, lambda: _others("compact_pages"), "move_rows"
    ),
}


def times(name: str, before: TimedProgram) -> dict[str, dict[str, float]]:
    """Returns microseconds by case and choice; a choice that cannot run a case has none there."""
    tuned = OPS[name]
    op = tuned.op or name
    module = import_module(f"jsparse.pallas_kernels.{op}.{tuned.backend}")
    target = tuned.function or op
    function = getattr(module, target)
    functions = {OWN: function}
    functions |= {
        str(choice): partial(function, **{tuned.argument: choice})
        for choice in tuned.choices(module)
    }
    found: dict[str, dict[str, float]] = {}
    for nth, job in enumerate(tuned.jobs()):
        made, programs = job.build(), {}
        for choice, chosen in functions.items():
            (contender,) = tuned.jobs()[nth].contenders.values()
            with patch.object(module, target, chosen):
                try:
                    program = contender(*made)
                    jax.block_until_ready(program.run())
                    programs[choice] = program
                except Exception as error:
                    print(
                        f"  {job.case}, {choice}: {type(error).__name__}: {str(error)[:200]}",
                        flush=True,
                    )
        profiles = profile(list(programs.values()), before, RUNS)[1:]
        took = {
            choice: p["device"]["median"]
            for choice, p in zip(programs, profiles, strict=True)
            if "device" in p
        }
        found[job.case] = took
        for choice in dict.fromkeys(
            [*sorted(took, key=lambda choice: took[choice])[:3], *({OWN} & set(took))]
        ):
            print(f"  {job.case:32}{took[choice]:9.1f} us  {choice}", flush=True)
    return found


def ranking(found: dict[str, dict[str, float]]) -> list[tuple[float, str]]:
    """Returns the choices that ran on every case, best first.

    Each has the geometric mean of its times over the best ones.
    """
    everywhere = set.intersection(*(set(took) for took in found.values()))
    means = [
        (geometric_mean([took[choice] / min(took.values()) for took in found.values()]), choice)
        for choice in everywhere
    ]
    return sorted(means)


def main() -> None:
    """Prints the three best choices of every op."""
    parser = report_parser("tune", "Time the tilings of the kernels.")
    parser.add_argument(
        "--only", nargs="+", choices=OPS, default=list(OPS), help="ops (default all)"
    )
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu":
        parser.error("needs a GPU")
    report: dict[str, Any] = {
        "benchmark": "tune",
        "environment": describe(allow_modified=args.allow_modified),
        "results": {},
    }
    before = lead()
    for name in args.only:
        print(name, flush=True)
        report["results"][name] = found = times(name, before)
        write_report(args.json, report)
        for mean, choice in ranking(found)[:3]:
            print(f"  over the best of each case {mean:.3f}  {choice}", flush=True)


if __name__ == "__main__":
    main()
