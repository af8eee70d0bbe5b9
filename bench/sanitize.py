"""What does compute-sanitizer say of each kernel? Memory accesses out of bounds, and races in shared memory.

A few GPU tests of every op run under it, with memory that no other array shares (XLA's pool off), so that an access
past an array's end is one past an allocation. Only our kernels are watched, not XLA's. racecheck knows no bulk copies
(TMA): of kernels that use them it sees ordinary loads and stores alone.

    python -m bench.sanitize [--only select ...] [--log PATH]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from bench.environment import REPOSITORY, describe

TOOLS = ("memcheck", "racecheck")
# of each test file: some of its tests, with few tokens each
TESTS = {
    "block_sparse": "matches and ([bits_16] or dense_and_bits or bias or [newest_unlisted] or h128_p32 or h256_p16)",
    "token_sparse": "matches and (scrambled-token_logits or newest_unlisted-None or bias)",
    "page_bounds": "matches and (scrambled or bfloat16-head_dim_96)",
    "int4_scores": "matches and (whole_scrambled or bits_16)",
    "select": "lists_what and ([top_p_union-0] or [top_k-0] or [top_k_union_capped-0] or [touched-0] or mass_top_k-0)",
    "place_logits": "does_what and ([any-0] or [dense_and_listed-0])",
    "row_gather": "does_what and (far_ids or large_pages-pinned_host)",
    "compact_pages": "does_what and (scrambled or every_other_head-in_place)",
}
KERNELS = ("mosaic_gpu", "_kernel", "_merge", "move_")  # parts of our kernels' names
WORKERS, SECONDS = 16, 1200


def check(name: str, tool: str) -> list[str]:
    """The lines that matter: what pytest counted, what the tool counted, and its first complaints."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "5"]
    command += [word for kernel in KERNELS for word in ("--kernel-name", f"kns={kernel}")]
    command += [sys.executable, "-m", "pytest", "-q", "-n", "0", "--no-cov", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/gpu/test_{name}_gpu.py", "-k", TESTS[name]]
    settings = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = partial(subprocess.run, cwd=REPOSITORY, env=os.environ | settings, capture_output=True, text=True)
    try:
        done = run(command, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [f"{name}, {tool}: not done after {SECONDS} s"]
    lines = (done.stdout + done.stderr).splitlines()
    said = [line.removeprefix("=========").strip() for line in lines if line.startswith("========= ")]
    said = [line for line in said if line and line != "COMPUTE-SANITIZER"]
    counted = [line.strip("= ") for line in lines if re.search(r"\d (passed|failed|error)", line)]
    return [f"{name}, {tool}: {'; '.join(counted + said[-1:])}", *(f"    {line}" for line in said[:-1][:40])]


def main() -> None:
    """Prints, and writes to a file, what each tool says of each op, as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m bench.sanitize", description="Kernels under compute-sanitizer.")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with CUDA's toolkit")
    here = describe()
    text = [f"{here['gpus']}, {here['versions']}, git {here['git_revision']}"]
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = [pool.submit(check, name, tool) for name in args.only for tool in TOOLS]
        for run in as_completed(runs):
            print(*run.result(), sep="\n", flush=True)
            text += run.result()
            if args.log is not None:
                args.log.parent.mkdir(parents=True, exist_ok=True)
                args.log.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
