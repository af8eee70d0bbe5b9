"""Times attention of one query through PyTorch and FlashInfer, on the cases of bench.kernels.

It runs in its own process.

    torch FA2           scaled_dot_product_attention, FLASH_ATTENTION: dense in every case
    torch cuDNN         the same, CUDNN_ATTENTION
    FlashInfer CUDA     BatchDecodeWithPagedKVCacheWrapper on CUDA cores; dense cases with all heads
                        of a row in a page, others with every KV head as its own request; the plan
                        is made before
    FlashInfer tensor   the same on tensor cores. FlashInfer's FA2 kernels: its FA3, its default on
                        Hopper, does not split a request

Every time is that of one CUDA graph of calls that take turns with their inputs, as in
bench.kernels.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from bench.lib.environment import REPOSITORY
from bench.lib.kernel_cases import (
    CASES,
    HEAD_DIM,
    KV_HEADS,
    ROTATED_BYTES,
    AttentionCase,
    dense_shapes,
)
from bench.lib.subprocesses import run_child, spread

PEERS = ("torch", "flashinfer")
WORKSPACE_BYTES = 512 << 20
BUILD_SECONDS, CHILD_SECONDS = 240, 240
# calls per graph; its replays; their seconds
MIN_CALLS, MAX_REPLAYS, SECONDS = 16, 20, 0.1


def time_graph(calls: Sequence[Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Returns microseconds per call of a graph.

    The graph has each of the calls in turn, at least MIN_CALLS in all.
    """
    import torch

    calls = list(calls) * -(-MIN_CALLS // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay(times: int) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(times):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / times * 1e3

    graph.replay()
    replays = min(max(int(SECONDS * 1e6 / replay(1)), 1), MAX_REPLAYS)
    return spread([replay(replays) / len(calls) for _ in range(repeats)])


def torch_rows(shapes: Sequence[tuple[int, int, int]], repeats: int) -> Iterator[dict[str, Any]]:
    """Yields dense attention of each (heads, batch, context)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backends = {"torch FA2": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    for heads, batch, context in shapes:
        of_shape = AttentionCase("", batch, context, dense="all")
        copies = -(-ROTATED_BYTES // of_shape.pool_bytes)
        shape = (batch, KV_HEADS, context, HEAD_DIM)
        q, pools = new(batch, heads, 1, HEAD_DIM), [(new(shape), new(shape)) for _ in range(copies)]
        calls = [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in pools]
        for contender, backend in backends.items():
            row = {"contender": contender, "heads": heads, "batch": batch, "context": context}
            with sdpa_kernel(backend):
                yield row | attempt(lambda calls=calls: {"us": time_graph(calls, repeats)})
        del q, pools, calls
        torch.cuda.empty_cache()


def flashinfer_rows(cases: Sequence[AttentionCase], repeats: int) -> Iterator[dict[str, Any]]:
    """Yields each case that FlashInfer supports: no token bits, no bias, no report."""
    import torch

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for case in cases:
        if case.bits or case.bias or case.stats:
            continue
        # all heads of a row in a page, or every head as a request with its own pages
        requests, heads = (case.batch, KV_HEADS) if case.dense == "all" else (case.pairs, 1)
        shape = (requests * case.context // case.unit, 2, case.unit, heads, HEAD_DIM)
        pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        shape = (requests, case.batch * case.heads // requests, HEAD_DIM)
        q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for contender, tensor_cores in (("FlashInfer CUDA", False), ("FlashInfer tensor", True)):
            row = {"contender": contender, "case": case.name}
            yield row | attempt(
                partial(_time_flashinfer, case, workspace, q, pool, tensor_cores, repeats)
            )
        del q, pool
        torch.cuda.empty_cache()


def _time_flashinfer(
    case: AttentionCase, workspace, q, pool, tensor_cores: bool, repeats: int
) -> dict[str, Any]:
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    calls = []
    for seed in range(1 if case.dense == "all" else case.calls):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto",
        )
        ends, pages, last = (torch.from_numpy(array) for array in _requests(case, seed, len(q)))
        plan = partial(
            wrapper.plan, ends, pages.cuda(), last, q.shape[1], pool.shape[3], HEAD_DIM, case.unit
        )
        plan = partial(plan, pos_encoding_mode="NONE", q_data_type=q.dtype, kv_data_type=pool.dtype)
        plan()
        calls.append(partial(wrapper.run, q, pool))
    torch.cuda.synchronize()
    began = time.perf_counter()
    plan()
    torch.cuda.synchronize()
    planned = (time.perf_counter() - began) * 1e6
    return {"us": time_graph(calls, repeats), "plan_us": planned}


def _requests(
    case: AttentionCase, seed: int, requests: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the ends of the requests' pages, the pages, and the tokens in each last page.

    All pages are full.
    """
    units = case.context // case.unit
    lists = [np.arange(units)] * requests
    if requests != case.batch:
        dense, counts = case.dense_heads(seed), case.counts(seed)
        rows = zip(case.ids(seed), dense, counts, strict=True)
        lists = [np.arange(units) if whole else row[:count] for row, whole, count in rows]
    ends = np.cumsum([0, *(len(row) for row in lists)])
    pages = np.concatenate([row + nth * units for nth, row in enumerate(lists)])
    return ends.astype(np.int32), pages.astype(np.int32), np.full(requests, case.unit, np.int32)


def present(wanted: Sequence[str], left_out: dict[str, str], *, on_gpu: bool) -> list[str]:
    """Returns the peers that can run here; `left_out` gets the reason for each of the others."""
    here = [name for name in wanted if on_gpu and find_spec(name) is not None]
    left_out |= {
        name: "not installed" if on_gpu else "needs a GPU" for name in wanted if name not in here
    }
    return here


@contextmanager
def building(left_out: dict[str, str]) -> Iterator[None]:
    """Compiles FlashInfer's kernels in another process, in parallel; they are ready on exit."""
    with TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "bench.lib.peers", "--build"]
        child = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
            child.wait(BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            left_out["flashinfer"] = f"its compilation took more than {BUILD_SECONDS} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # also its compilers
                child.wait()
        if child.returncode and "flashinfer" not in left_out:
            log.seek(0)
            left_out["flashinfer"] = f"its compilation failed: {log.read()[-600:]}"


def from_child(
    names: Sequence[str],
    only: Sequence[str] | None,
    grids: Sequence[tuple[int, int, int]],
    repeats: int,
    left_out: dict[str, str],
) -> list[dict[str, Any]]:
    """Returns the rows of those that are not left out; PyTorch's include the grids' shapes."""
    names = [name for name in names if name not in left_out]
    if not names:
        return []
    shapes = ["x".join(map(str, shape)) for shape in grids]
    arguments = ["--peers", *names, "--grids", *shapes, "--repeats", str(repeats)]
    try:
        return run_child(
            "bench.lib.peers",
            arguments + (["--only", *only] if only else []),
            timeout_s=CHILD_SECONDS,
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        left_out |= dict.fromkeys(names, str(error)[-600:])
        return []


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the measurement or its error, so that the other contenders keep their rows."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}


def numbers(shape: str) -> list[int]:
    """Parses a text such as 32x8x4096."""
    return [int(number) for number in shape.split("x")]


def _of_shapes(shapes: Sequence[str]) -> list[AttentionCase]:
    return [
        AttentionCase("", batch, context, heads=heads)
        for heads, batch, context in map(numbers, shapes)
    ]


def build() -> None:
    """Compiles both modules of `flashinfer_rows` in parallel; FlashInfer caches them."""
    os.nice(10)  # jsparse compiles at the same time
    import torch
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    options = (HEAD_DIM, HEAD_DIM, 0, False, False)  # no position encoding, window or soft cap
    parts = [
        gen_batch_decode_module(*types, *options),
        gen_batch_prefill_module("fa2", *types, *options, False),
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda part: part.build(verbose=False), parts))


def main() -> None:
    """Prints the rows of the requested peers as a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lib.peers", description="Time PyTorch and FlashInfer."
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="default all")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only cases whose name contains one of these"
    )
    parser.add_argument(
        "--grids",
        nargs="*",
        metavar="SHAPE",
        default=(),
        help="also time PyTorch on these: heads x batch x context",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="time only these, with PyTorch's dense attention",
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements (default 5)")
    parser.add_argument("--build", action="store_true", help="only compile FlashInfer's kernels")
    args = parser.parse_args()
    if args.build:
        build()
        return
    if args.shapes:
        print(json.dumps(list(torch_rows(dense_shapes(_of_shapes(args.shapes)), args.repeats))))
        return
    cases = [
        case for case in CASES if args.only is None or any(name in case.name for name in args.only)
    ]
    rows = []
    if "torch" in args.peers:
        rows += torch_rows(dense_shapes([*cases, *_of_shapes(args.grids)]), args.repeats)
    if "flashinfer" in args.peers:
        rows += flashinfer_rows(cases, args.repeats)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
