"""How long does each kernel take, compared with its minimum bytes, PyTorch and FlashInfer?

Attention of one query per head in the shape of Llama 3.1 8B, dense and over listed pages or tokens,
and the other ops of policies: page bounds, 4-bit scores, selection, runs, gather, compaction. Cases
are in lib/kernel_cases and lib/kernel_ops, clocks in lib/kernel_timing, PyTorch and FlashInfer in
lib/peers. In the table, microseconds per call:

    us          on the device, from the start of its first kernel to that of the next call's
    kernels     the sum of its kernels' durations + their number
    wall        on the host's clock, amortised over the calls of one program
    floor       bytes over the bandwidth that this run measures: a sum over 2 GB; from host memory,
                a copy of 268 MB
    x           us over floor

PyTorch's times are those of dense attention in every case. `--grid` adds dense and 50 % to 2 %
of 8K to 128K tokens at batch 1 to 16, each call alone and cold. `--hybrid` does the same for 4, 6,
7 or 8 of a row's 8 KV heads that attend to 10 % of 16K to 128K tokens, or to 4096, beside dense
ones, at batch 1 to 8 (LycheeDecode's Figure 5).

    python -m bench.kernels --grid --hybrid --json build/kernels.json
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from bench.lib import kernel_ops, peers
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.kernel_cases import CASES, GRIDS, INT8_CASES, AttentionCase, dense_shapes, shrunk
from bench.lib.kernel_programs import Job, attention_job
from bench.lib.kernel_rows import (
    Settings,
    bandwidth,
    grid_contender,
    grid_rows,
    job_rows,
    warm,
    warm_grid,
)
from bench.lib.kernel_table import lines
from bench.lib.kernel_timing import LEAD_BYTES, lead
from bench.lib.llama_8b import READ_BANDWIDTH
from bench.lib.subprocesses import write_report

MAX_POOL_BYTES, MEMORY_SHARE = 100 * 10**9, 0.5  # of K and V, in the grids
TINY = 512  # the factor by which --tiny shrinks
PACKAGES = ("triton", "jax-triton", "flashinfer-python")


def main() -> None:
    """Times the requested cases and prints a table."""
    parser = report_parser("kernels", "Time the kernels.")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only cases whose name contains one of these"
    )
    for name, of in (("grid", "fraction attended"), ("hybrid", "number of sparse heads")):
        what = f"also time batch by context by {of}"
        parser.add_argument(
            f"--{name}", dest="grids", action="append_const", const=name, default=[], help=what
        )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=peers.PEERS,
        default=peers.PEERS,
        help="default all; with no name, none",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="shapes for a CPU, to test the script; times mean nothing",
    )
    args = parser.parse_args()
    # arrays are allocated and freed, and the peers' process also needs memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu" and not args.tiny:
        parser.error("needs a GPU; --tiny tests the script on a CPU")
    report = measure(
        args.only,
        args.peers,
        args.json,
        grids=args.grids,
        quick=args.quick,
        tiny=args.tiny,
        allow_modified=args.allow_modified,
    )
    print(*lines(report), sep="\n")


def measure(
    only: Sequence[str] | None,
    wanted: Sequence[str],
    path: Path | None = None,
    *,
    grids: Sequence[str] = (),
    quick: bool = False,
    tiny: bool = False,
    allow_modified: bool = False,
) -> dict[str, Any]:
    """Returns the report, and writes it to `path` after every case."""
    on_gpu = jax.default_backend() == "gpu"
    settings = Settings(calls=40, repeats=2, runs=4) if quick or tiny else Settings()
    jobs, cases = _work(only, grids, on_gpu=on_gpu, tiny=tiny)
    of_grids = list(chain.from_iterable(cases.values()))
    contender = grid_contender("mosaic" if on_gpu else "reference")
    report = _header(settings, allow_modified=allow_modified)
    ready = peers.present(wanted, report["left_out"], on_gpu=on_gpu)
    if "flashinfer" in ready:
        with _stage("compiling, FlashInfer beside", report), peers.building(report["left_out"]):
            for job in jobs:
                warm(job)
            warm_grid(of_grids, contender)
    with _stage("peers", report):
        report["peers"] = peers.from_child(
            ready, only, dense_shapes(of_grids), settings.repeats, report["left_out"]
        )
    for name, reason in report["left_out"].items():
        print(f"{name} is left out: {reason}", flush=True)
    nbytes = LEAD_BYTES // (TINY if tiny else 1)
    before = lead(nbytes)
    rate = bandwidth(before, nbytes, settings, on_gpu=on_gpu)
    report["bandwidth"] = {**rate._asdict(), "assumed_elsewhere": READ_BANDWIDTH}
    with _stage("cases", report):
        for job in jobs:
            report["results"] += job_rows(job, before, rate, settings)
            write_report(path, report)
    for name, same in cases.items():
        with _stage(name, report):
            for row in grid_rows(same, contender, before, rate, settings):
                report[name].append(row)
                write_report(path, report)
    write_report(path, report)
    return report


def _work(
    only: Sequence[str] | None, names: Sequence[str], *, on_gpu: bool, tiny: bool
) -> tuple[list[Job], dict[str, list[AttentionCase]]]:
    """Returns the requested jobs, and the cases of the requested grids."""
    limit, max_calls = _memory_limit(), 2 if tiny else 32
    cases, grids = (*CASES, *INT8_CASES), {name: GRIDS[name](limit) for name in names}
    if tiny:
        cases = [shrunk(case) for case in cases]
        grids = {
            name: [shrunk(c) for c in some if c.pool_bytes == some[0].pool_bytes]
            for name, some in grids.items()
        }
    jobs = [attention_job(case, on_gpu=on_gpu, max_calls=max_calls) for case in cases]
    jobs += kernel_ops.jobs(on_gpu=on_gpu, max_calls=max_calls, shrink=TINY if tiny else 1)
    return [job for job in jobs if only is None or any(name in job.case for name in only)], grids


def _header(settings: Settings, *, allow_modified: bool) -> dict[str, Any]:
    environment = describe(allow_modified=allow_modified)
    for package in PACKAGES:
        try:
            environment["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "benchmark": "kernels",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": jax.local_devices()[0].device_kind,
        "environment": environment,
        "settings": settings._asdict(),
        "left_out": {},
        "seconds": {},
        "peers": [],
        "results": [],
        **{name: [] for name in GRIDS},
    }


def _memory_limit() -> int:
    """Returns the maximum size of K and V of a grid's case."""
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return MAX_POOL_BYTES if memory is None else min(MAX_POOL_BYTES, int(MEMORY_SHARE * memory))


@contextmanager
def _stage(name: str, report: dict[str, Any]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    report["seconds"][name] = round(time.perf_counter() - began, 1)
    print(f"({name}: {report['seconds'][name]} s)", flush=True)


if __name__ == "__main__":
    main()
