"""What does compute-sanitizer report for each kernel: accesses out of bounds, races?

A few small cases of every op run under memcheck, and under racecheck for races in shared memory.
Every array has its own allocation (XLA's pool is off), so that an access past an array's end is
outside any allocation. Inputs are made on the CPU and nothing is compared, which is the tests'
task, so almost only our own kernels are launched. CUDA graphs and XLA's autotuning are off.
racecheck does not support bulk copies (TMA): in kernels that use them it sees only ordinary loads
and stores.

    python -m bench.sanitize [--only threshold_select ...] [--workers 4] [--seconds 300] [--log
    PATH]
"""

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT

import jax

from bench.lib.arguments import recording_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.small_cases import OPS, Op

TOOLS = ("memcheck", "racecheck")
SETTINGS = {
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
}
GRACE = 60  # seconds for a run to exit by itself after its time


def run(op: Op, seconds: float) -> None:
    """Runs an op's cases and prints each when it ends; after `seconds` it prints a traceback."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    device = jax.devices()[0]
    for name, case in op.cases.items():
        with jax.default_device(jax.devices("cpu")[0]):
            built = op.build(case)
        inputs = jax.tree.map(
            lambda x: jax.device_put(x, device) if isinstance(x, jax.Array) else x, built
        )
        start = time.perf_counter()
        jax.block_until_ready(op.call(case, inputs))
        print(f"ran {name} in {time.perf_counter() - start:.1f} s", flush=True)


def check(name: str, tool: str, seconds: float) -> list[str]:
    """Returns the finished cases of an op, the tool's counts, and the rest of its output."""
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--print-limit",
        "5",
        "--target-processes",
        "application-only",
    ]
    command += [sys.executable, "-m", "bench.sanitize", "--run", name, "--seconds", str(seconds)]
    watch = partial(
        subprocess.run, cwd=REPOSITORY, env=os.environ | SETTINGS, stdout=PIPE, stderr=STDOUT
    )
    start = time.perf_counter()
    try:
        output = watch(command, timeout=seconds + GRACE).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    took = time.perf_counter() - start
    lines = [
        line.removeprefix("=========").strip()
        for line in output.decode(errors="replace").splitlines()
    ]
    ran = [line for line in lines if line.startswith("ran ")]
    counts = [line for line in lines if " SUMMARY: " in line]
    rest = [line for line in lines if line and line not in (*ran, *counts, "COMPUTE-SANITIZER")]
    cases = f"{len(ran)} of {len(OPS[name].cases)} cases in {took:.0f} s"
    return [
        f"{name}, {tool}: {'; '.join([cases, *counts])}",
        *(f"    {line}" for line in [*ran, *rest[:60]]),
    ]


def is_clean(line: str) -> bool:
    """Returns whether all cases ran and every summary in the line has a count of 0."""
    ran = re.search(r": (\d+) of \1 cases", line)
    return ran is not None and set(re.findall(r"SUMMARY: (\d+)", line)) == {"0"}


def main() -> None:
    """Prints each tool's result for each op when it ends, and writes it to a file.

    The exit status is 1 after any finding.
    """
    parser = recording_parser("sanitize", "Run the kernels under compute-sanitizer.")
    parser.add_argument(
        "--only", nargs="+", choices=OPS, default=list(OPS), help="ops (default all)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=4,
        help="parallel runs, which take turns on the GPU (default 4)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=300,
        help="time limit of an op's cases under a tool (default 300)",
    )
    parser.add_argument("--log", type=Path, metavar="PATH", help="write the output here")
    parser.add_argument(
        "--run", choices=OPS, help="run the cases of this op in this process, without a tool"
    )
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: must be at least 1")
    if args.run is not None:
        run(OPS[args.run], args.seconds)
        return
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with CUDA's toolkit")
    here = describe(allow_modified=args.allow_modified)
    revision = f"git {here['git_revision']}{' (modified)' if here['modified'] else ''}"
    clean, text = True, [f"{here['gpus']}, {here['versions']}, {revision}"]
    with ThreadPoolExecutor(args.workers) as pool:
        runs = [
            pool.submit(check, name, tool, args.seconds) for name in args.only for tool in TOOLS
        ]
        for done in as_completed(runs):
            print(*done.result(), sep="\n", flush=True)
            text += done.result()
            clean &= is_clean(done.result()[0])
            if args.log is not None:
                args.log.parent.mkdir(parents=True, exist_ok=True)
                args.log.write_text("\n".join(text) + "\n")
    sys.exit(not clean)


if __name__ == "__main__":
    main()
