"""What does Twilight's attention cost, next to dense attention and Quest alone?

One layer of the 8B shape selects and attends, as in the decode step, over a cache full of random K
and V; Twilight's counts replay a trace of SmolLM2 (bench.twilight_trace), everything else runs on
the true sizes. Quest's budget is a quarter of the context, its conservative one, and Twilight's
base is that Quest, one with half the context, or all pages. PyTorch's FlashAttention-2 is dense
attention in the same run. In the table, microseconds per call on the device, launch gaps included;
the times of Twilight's parts are sums over kernels:

    base        page bounds and their top-k
    estimate    logits from the 4-bit copy of the listed tokens
    top-p       their pruning, and its conversion into the cache's pages
    attend      attention over the rest, and the merge of its splits

    python -m bench.twilight_speed --json build/twilight_speed.json
"""

import itertools
import os
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.kernel_cases import HEAD_DIM, KV_HEADS, ROTATED_BYTES, AttentionCase
from bench.lib.kernel_programs import Contender, Job, cache
from bench.lib.kernel_rows import Bandwidth, Settings, bandwidth, job_rows
from bench.lib.kernel_timing import LEAD_BYTES, TimedProgram, lead
from bench.lib.llama_8b import key_constants, state_after_prompt
from bench.lib.peers import numbers
from bench.lib.replay import parse
from bench.lib.subprocesses import run_child, write_report
from jsparse.cache import CacheSpec, KVCache, StepView
from jsparse.hooks import State
from jsparse.policy import Policy
from jsparse.runtime.decode_step import attend_layer
from jsparse.selection import everything

BATCHES, CONTEXTS = (1, 8, 32, 64), (10240, 30720, 131072)
BREAK_EVEN = (
    (1, 2048),
    (1, 65536),
    (8, 2048),
    (8, 4096),
    (32, 1024),
    (64, 512),
    (64, 1024),
)  # batch, context: dense attention is fast here
# a selection and its attention read about an eighth of the bytes of dense attention
READ_SHARE, MAX_CACHES, MIN_CALLS = 8, 16, 4
SMALL_BYTES = 2**20  # larger parts of a state would be copied inside the barrier
BASES = {"": "quest(budget={})", ", 8 bits": "quest(budget={}, bounds_dtype='uint8')"}
PARTS, SIGNS = ("base", "estimate", "top_p", "attend"), ("scores_kernel", "mosaic_gpu")


def policies(context: int) -> dict[str, str]:
    """Returns the contenders' expressions by name, except "dense"."""
    bases = {bits: text.format(context // 4) for bits, text in BASES.items()}
    quests = {f"quest{bits}": base for bits, base in bases.items()}
    wider = {", all pages": "all_pages()", ", half": f"quest(budget={context // 2})"}
    return quests | {
        f"twilight{name}": f"replayed(twilight({base}, p=0.95))"
        for name, base in (bases | wider).items()
    }


def dense() -> Policy:
    """Returns dense attention whose selection is an input.

    XLA would compute a constant selection only once, before the first call.
    """

    def init(spec: CacheSpec):
        return everything(jnp.zeros((spec.batch, spec.num_kv_heads), jnp.int32))

    return Policy(lambda selection, *_: (selection, None, selection), init=init, name="dense")


def spec_of(case: AttentionCase) -> CacheSpec:
    """Returns the spec of a cache of one layer."""
    return CacheSpec(
        1, case.batch, case.heads, KV_HEADS, HEAD_DIM, case.page, case.num_pages, jnp.bfloat16
    )


def contender(
    policy: Policy, spec: CacheSpec, note: Callable[[State], None] = lambda state: None
) -> Contender:
    """Returns a maker of programs with one call per query, over the caches in turn.

    Each call waits for the one before. `note` gets the state of the first cache.
    """

    @jax.jit
    def run(sources, constants, queries):
        results, out = [], None
        for q, (held, state) in zip(queries, itertools.cycle(sources), strict=False):
            layer = held.layers[0]
            leaves, tree = jax.tree.flatten(state)
            small = {nth: leaf for nth, leaf in enumerate(leaves) if leaf.nbytes < SMALL_BYTES}
            q, lengths, small, out = jax.lax.optimization_barrier((q, layer.lengths, small, out))
            layers = (layer._replace(lengths=lengths),)
            held = StepView(held.cache._replace(layers=layers), constants)
            state = tree.unflatten([small.get(nth, leaf) for nth, leaf in enumerate(leaves)])
            out = attend_layer(policy, 0, q, held, state)[0].o
            results.append(out)
        return results

    def program(caches, queries):
        states = [state_after_prompt(policy, spec, held) for held in caches]
        note(states[0])
        # one argument for all calls, as in a step for all layers: angles are computed once
        constants = caches[0].constants
        sources = [
            (held._replace(constants=None), own) for held, own in zip(caches, states, strict=True)
        ]
        return TimedProgram(lambda: run(sources, constants, queries), len(queries))

    return program


def job(case: AttentionCase, names: Sequence[str] | None) -> Job:
    """Returns the job of all contenders on one shape; `bytes` are dense attention's."""
    spec = spec_of(case)
    copies = min(-(-READ_SHARE * ROTATED_BYTES // case.pool_bytes), MAX_CACHES)

    def build():
        held = [cache(case) for _ in range(copies)]
        keys = jax.random.split(jax.random.key(0), max(copies, MIN_CALLS))
        queries = [
            jax.random.normal(key, (case.batch, case.heads, HEAD_DIM), jnp.bfloat16) for key in keys
        ]
        constants = key_constants(spec)
        caches = [
            StepView(KVCache((layer,), layer.lengths[:, 0], jnp.bool_(False)), constants)
            for layer in held
        ]
        return caches, queries

    made = {"dense": dense()} | {
        name: parse(text, case.context) for name, text in policies(case.context).items()
    }
    contenders = {
        name: contender(policy, spec)
        for name, policy in made.items()
        if names is None or name in names
    }
    return Job(case.name, case.pool_bytes, build, contenders, attention=case)


def parts(row: dict[str, Any]) -> dict[str, float]:
    """Returns microseconds of Twilight's parts, by the kernels' order in a call.

    It is {} where there is no estimate.
    """
    order = row.get("order", [])
    estimates, attends = (
        [i for i, kernel in enumerate(order) if sign in kernel["name"]] for sign in SIGNS
    )
    if not (estimates and attends):
        return {}
    marks = (0, estimates[0], estimates[0] + 1, attends[0], len(order))
    times = [
        sum(kernel["us"] for kernel in order[start:stop])
        for start, stop in itertools.pairwise(marks)
    ]
    return dict(zip(PARTS, times, strict=True))


def measure(
    cases: Sequence[AttentionCase],
    names: Sequence[str] | None,
    path: Path | None,
    nbytes: int,
    *,
    allow_modified: bool = False,
) -> dict[str, Any]:
    """Returns the report, and writes it to `path` after every case."""
    on_gpu = jax.default_backend() == "gpu"
    report = {
        "benchmark": "twilight_speed",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": jax.local_devices()[0].device_kind,
        "environment": describe(allow_modified=allow_modified),
        "peers": peers(cases) if on_gpu else [],
        "results": [],
    }
    before, settings = lead(nbytes), Settings(calls=40, repeats=3, runs=6)
    rate: Bandwidth = bandwidth(before, nbytes, settings, on_gpu=on_gpu)
    report["bandwidth"] = rate._asdict()
    for case in cases:
        rows = job_rows(job(case, names), before, rate, settings)
        report["results"] += [row | {"parts": parts(row)} for row in rows]
        print(
            *(line(row, report["peers"]) for row in report["results"][-len(rows) :]),
            sep="\n",
            flush=True,
        )
        write_report(path, report)
    return report


def peers(cases: Sequence[AttentionCase]) -> list[dict[str, Any]]:
    """Returns PyTorch's times, or the error in their place."""
    shapes = [f"{case.heads}x{case.batch}x{case.context}" for case in cases]
    try:
        return run_child(
            "bench.lib.peers", ["--peers", "torch", "--shapes", *shapes], timeout_s=240
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [{"error": str(error)[-600:]}]


def line(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """Formats one line of the table."""
    text = f"{row['case']:14}{row['contender']:18}"
    if "us" not in row:
        return f"{text}{row.get('refused') or row.get('error')}".replace("\n", " ")[:150]
    us, shape = row["us"]["median"], ("heads", "batch", "context")
    text += f"{us:9.1f}"
    for peer in others:
        if (
            peer.get("contender") == "torch FA2"
            and all(peer[key] == row[key] for key in shape)
            and "us" in peer
        ):
            text += f"  FA2 {peer['us']['median']:8.1f} ({peer['us']['median'] / us:4.1f}x)"
    return text + "".join(f"  {name} {value:.1f}" for name, value in row["parts"].items())


def main() -> None:
    """Times the requested cases and prints a line for each."""
    parser = report_parser("twilight_speed", "Time Twilight's attention.")
    parser.add_argument("--cases", nargs="+", help="batch x context, such as 64x30720")
    parser.add_argument(
        "--only", nargs="+", choices=["dense", *policies(0)], help="contenders (default all)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="one shape for a CPU, to test the script; times mean nothing",
    )
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu" and not args.tiny:
        parser.error("needs a GPU; --tiny tests the script on a CPU")
    shapes = [*itertools.product(BATCHES, CONTEXTS), *BREAK_EVEN]
    if args.tiny:
        shapes = [(2, 256)]
    elif args.cases:
        shapes = [numbers(case) for case in args.cases]
        if wrong := [
            text
            for text, shape in zip(args.cases, shapes, strict=True)
            if len(shape) != 2 or shape[1] % 64
        ]:
            parser.error(
                f"--cases {wrong[0]}: must be batch x context, the context a multiple of 64 tokens"
            )
    cases = [AttentionCase(f"{b} x {c}", b, c, dense="all") for b, c in shapes]
    nbytes = LEAD_BYTES // 1000 if args.tiny else LEAD_BYTES
    measure(cases, args.only, args.json, nbytes, allow_modified=args.allow_modified)


if __name__ == "__main__":
    main()
