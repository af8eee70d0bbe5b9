"""What does LycheeCluster cost by part, next to dense attention and Quest, and how large is it?

    operator    one layer of the 8B shape selects and attends, as in the decode step, at budgets of
                equal size, over a cache of keys that lie around a few hundred directions
    index       building the index at the last chunk of a prompt, over all layers, packing new
                tokens into it, and its bytes; a process per length
    prefill     reading the prompt, dense and with the policy; a process per length and policy
    search      scoring the clusters of one layer for one query, all of them and by units, and what
                remains to be done over all chunks; bench.lib.cluster_search has the contenders

Prompts are of random tokens, which are cut into chunks as prose is. In the operator's table,
microseconds per call on the device, launch gaps included, or the host's where there is no profile;
the times of the parts are sums over kernels:

    scores      products with centroids, and all that is none of the kernels below
    choose      threshold_select
    list        runs_to_tokens
    attend      attention over the list, and the merge of its splits

"packing" cuts and clusters new tokens of one layer, once per 16 steps; `us_with_packing` adds a
step's share of it, an upper bound, since a model cuts its chunks once for all layers (see index).
Speeds over dense attention leave it out. Beside each stands the ratio of bytes: all K and V,
against the K and V of the budget and the used part of what the policy holds; the unused part, up to
a third more, is read too. PyTorch's FlashAttention-2 is dense attention in the same run. Times of
building and packing are the host's, of one call that is waited for.

    python -m bench.lychee_cluster_speed --json build/lychee_cluster_speed.json
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.lib.arguments import report_parser
from bench.lib.cluster_search import search_job
from bench.lib.environment import describe
from bench.lib.kernel_cases import HEAD_DIM, ITEM_BYTES, KV_HEADS, ROTATED_BYTES, AttentionCase
from bench.lib.kernel_programs import Contender, Job, lengths, random
from bench.lib.kernel_rows import Bandwidth, Settings, bandwidth, job_rows
from bench.lib.kernel_timing import LEAD_BYTES, TimedProgram, lead
from bench.lib.llama_8b import LLAMA_8B, boundary_constants, key_constants, state_after_prompt
from bench.lib.peers import numbers
from bench.lib.subprocesses import run_child, spread, write_report
from bench.twilight_speed import contender, dense, peers, spec_of
from bench.twilight_speed import line as line_of_case
from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView
from jsparse.hooks import PrefillView, State
from jsparse.policies.expressions import parse
from jsparse.policy import Policy
from jsparse.runtime.chunk_attention import FLASH_CHUNK

PARTS = ("operator", "index", "prefill", "search")
SHAPES, CONTEXTS = ((1, 131072), (8, 131072), (1, 32768), (8, 32768)), (32768, 131072)
SEARCHED = ((1, 32768), (1, 131072), (1, 1048576), (8, 131072))
BUDGET, CALLS, PAGE = 1024, 16, 16
COPIES = 32  # of the pools that dense attention rotates: sparse calls read a thirtieth of its bytes
DIRECTIONS, SCATTER = 256, 0.5  # of keys: how many there are, and the noise around them
RUNS, PACKINGS = 3, 16  # of the index
SIGNS = {
    "choose": ("select_kernel",),
    "list": ("list_kernel",),
    "attend": ("attend_kernel", "_merge"),
}
OURS = "lychee_cluster"


def expressions(budget: int) -> dict[str, str]:
    """Returns the contenders' expressions by name, except "dense" and "packing"."""
    return {
        "quest": f"quest(budget={budget})",
        "arkvale": f"arkvale(budget={budget})",
        "cluster_kv": f"cluster_kv(budget={budget})",
        OURS: f"lychee_cluster(budget={budget})",
        f"{OURS}, bound": f"lychee_cluster(budget={budget}, rank='bound')",
        f"{OURS}, levels": f"lychee_cluster(budget={budget}, levels=2)",
    }


@partial(jax.jit, static_argnums=(1, 2))
def clustered(seed: Array | int, pages: int, page: int) -> Array:
    """Returns keys [pages, P, H] around DIRECTIONS directions; those of a page lie around one."""
    keys = jax.random.split(jax.random.key(seed), 3)
    around = jax.random.normal(keys[0], (DIRECTIONS, 1, HEAD_DIM), jnp.bfloat16)
    of_page = jax.random.randint(keys[1], (pages,), 0, DIRECTIONS)
    noise = jax.random.normal(keys[2], (pages, page, HEAD_DIM), jnp.bfloat16)
    return around[of_page] + SCATTER * noise


def packing(policy: Policy, spec: CacheSpec) -> Contender:
    """Returns a maker of programs of CALLS calls of `maintain`, over the caches in turn.

    Each cache has `period` more tokens in every call. The prompt leaves room for these.
    """
    prompt = spec.capacity - min(32 * CALLS * policy.services.period, spec.capacity // 2)

    def at_length(view: StepView, length: Array) -> StepView:
        layer, length = view.layers[0], jnp.minimum(length, spec.capacity)
        layer = layer._replace(lengths=jnp.broadcast_to(length, layer.lengths.shape))
        positions = jnp.full_like(view.positions, length)
        return view._replace(cache=view.cache._replace(layers=(layer,), positions=positions))

    def run(states, length, caches):
        states, waited = list(states), None
        for nth in range(CALLS):
            at = nth % len(caches)
            length, waited = jax.lax.optimization_barrier((length, waited))
            length += policy.services.period * (at == 0)
            states[at], _ = policy.services.maintain(states[at], at_length(caches[at], length))
            # a number of every array waits for its update and copies nothing
            waited = [leaf[(slice(1),) * leaf.ndim] for leaf in jax.tree.leaves(states[at])]
        return tuple(states), length

    step = jax.jit(run, donate_argnums=(0, 1))

    def program(caches, queries):
        length = jnp.int32(prompt)
        after_prompt = (
            state_after_prompt(policy, spec, at_length(held, length)) for held in caches
        )
        kept = [(tuple(after_prompt), length)]

        def call():
            kept[0] = step(*kept[0], caches)
            return kept[0][1]

        return TimedProgram(call, CALLS)

    return program


def job(case: AttentionCase, budget: int, note: Callable[[str, State], None]) -> Job:
    """Returns the job of all contenders on one shape; `bytes` are dense attention's.

    `note` gets the name and a state of every policy that has one.
    """
    spec = spec_of(case)
    copies = max(min(-(-COPIES * ROTATED_BYTES // case.pool_bytes), CALLS), 2)

    def build():
        pages, no_row = case.pairs * case.num_pages, jnp.zeros(case.batch, jnp.bool_)
        constants = key_constants(spec) | boundary_constants()
        caches = []
        for seed in range(copies):
            keys, values = (
                clustered(seed, pages, case.page),
                random(1, (pages, case.page, HEAD_DIM)),
            )
            layer = LayerCache(keys, values, lengths(case))
            caches.append(StepView(KVCache((layer,), layer.lengths[:, 0], no_row), constants))
        queries = [
            jax.random.normal(key, (case.batch, case.heads, HEAD_DIM), jnp.bfloat16)
            for key in jax.random.split(jax.random.key(0), CALLS)
        ]
        return caches, queries

    made = {name: parse(text) for name, text in expressions(budget).items()}
    contenders = {"dense": contender(dense(), spec)}
    contenders |= {
        name: contender(policy, spec, partial(note, name)) for name, policy in made.items()
    }
    contenders["packing"] = packing(made[OURS], spec)
    return Job(case.name, case.pool_bytes, build, contenders, attention=case)


def parts(row: dict[str, Any]) -> dict[str, float]:
    """Returns microseconds of the parts of a policy that lists runs; {} for the others."""
    kernels = row.get("by_kernel", {})
    if not any(name.startswith(SIGNS["list"]) for name in kernels):
        return {}
    spent = {name: kernel["us"] * kernel["launches"] for name, kernel in kernels.items()}
    named = {
        part: sum(us for name, us in spent.items() if name.startswith(signs))
        for part, signs in SIGNS.items()
    }
    return {"scores": sum(spent.values()) - sum(named.values()), **named}


def used_bytes(state: State) -> int:
    """Returns the bytes of a state without the zeros at the end of each array's longest axis.

    The axis of H, which clusters and pages have in common, is never that.
    """
    total = 0
    for leaf in jax.tree.leaves(state):
        axis = int(np.argmax(leaf.shape[:-1] if leaf.shape[-1] == HEAD_DIM else leaf.shape))
        others = tuple(i for i in range(leaf.ndim) if i != axis)
        (filled,) = np.nonzero(np.asarray(jnp.any(leaf != 0, axis=others)))
        total += leaf.nbytes // leaf.shape[axis] * (filled.max(initial=-1) + 1)
    return int(total)


def compared(
    rows: Sequence[dict[str, Any]],
    held: dict[str, int],
    case: AttentionCase,
    budget: int,
    period: int,
) -> list[dict[str, Any]]:
    """Returns rows with their parts and, for policies, time and bytes next to dense attention's.

    `held` has the bytes that each policy holds of the context.
    """
    us = {row["contender"]: row["us"]["median"] for row in rows if "us" in row}
    found = []
    for row in rows:
        name, more = row["contender"], {"parts": parts(row)}
        if name in held and name in us:
            read = held[name] + 2 * case.pairs * budget * HEAD_DIM * ITEM_BYTES
            more |= {"held_bytes": held[name], "over_dense_bytes": case.pool_bytes / read}
            if name == OURS and "packing" in us:
                more["us_with_packing"] = us[name] + us["packing"] / period
            if "dense" in us:
                more["over_dense"] = us["dense"] / us[name]
        found.append(row | more)
    return found


def line(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """Formats one line of the operator's table."""
    text = line_of_case(row, others)
    if "us_with_packing" in row:
        text += f"  with packing {row['us_with_packing']:.1f}"
    if "over_dense" in row:
        text += f"  {row['over_dense']:.2f}x dense, {row['over_dense_bytes']:.1f}x by bytes"
    return text


def operator_rows(
    case: AttentionCase, budget: int, before: TimedProgram, rate: Bandwidth, settings: Settings
) -> list[dict[str, Any]]:
    """Measures all contenders on one shape."""
    held: dict[str, int] = {}

    def note(name: str, state: State) -> None:
        held[name] = used_bytes(state)

    rows = job_rows(job(case, budget, note), before, rate, settings)
    return compared(rows, held, case, budget, parse(expressions(budget)[OURS]).services.period)


def search_rows(
    batch: int, context: int, budget: int, before: TimedProgram, rate: Bandwidth, settings: Settings
) -> list[dict[str, Any]]:
    """Measures the search of one shape; `read_bytes` are what a contender must read."""
    job, read = search_job(batch, context, budget)
    rows = job_rows(job, before, rate, settings)
    return [row | {"read_bytes": read[row["contender"]]} for row in rows]


def line_of_search(row: dict[str, Any]) -> str:
    """Formats one line of the search."""
    text = f"search  {row['case']:14}{row['contender']:14}{row['read_bytes'] / 1e6:9.2f} MB"
    if "us" not in row:
        return f"{text}  {row.get('refused') or row.get('error')}".replace("\n", " ")[:150]
    return f"{text}{row['us']['median']:9.1f} us"


def index_times(context: int, expression: str, layers: int) -> dict[str, Any]:
    """Times what a policy does at the end of a prompt and in `maintain`, and counts its bytes.

    The prompt comes in chunks, as prompts do; the clock of the build starts when its last chunk's
    keys are there, and that of each packing after `period` more tokens.
    """
    policy, known = parse(expression), boundary_constants()
    chunk, room = min(FLASH_CHUNK, context // 2), (RUNS * PACKINGS + 1) * policy.services.period
    spec = CacheSpec(
        layers,
        1,
        LLAMA_8B.num_heads,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        -(-(context + room) // PAGE),
        jnp.bfloat16,
    )
    pools = [clustered(seed, spec.pages, PAGE) for seed in range(layers)]
    ids = jax.random.randint(
        jax.random.key(0), (1, spec.capacity), 0, LLAMA_8B.vocab_size, jnp.int32
    )

    def cache_of(pools, length, position) -> StepView:
        held = jnp.full((1, KV_HEADS), length, jnp.int32)
        layers = tuple(LayerCache(pool, pool, held) for pool in pools)
        at, no_row = jnp.full(1, position, jnp.int32), jnp.zeros(1, jnp.bool_)
        return StepView(KVCache(layers, at, no_row), known)

    def new(pool, first, number):
        """Returns the keys, tokens and positions of `number` slots."""
        keys = jax.lax.dynamic_slice_in_dim(pool.reshape(KV_HEADS, -1, HEAD_DIM), first, number, 1)
        tokens = jax.lax.dynamic_slice_in_dim(ids, first, number, 1)
        return keys.swapaxes(0, 1)[None], tokens, first + jnp.arange(number, dtype=jnp.int32)[None]

    @partial(jax.jit, static_argnames="last", donate_argnums=0)
    def read(state, pools, first, *, last):
        queries = jnp.zeros((1, policy.window, LLAMA_8B.num_heads, HEAD_DIM), jnp.bfloat16)
        valid, asked = jnp.full(1, chunk, jnp.int32), jnp.full(1, policy.window, jnp.int32)
        cache = cache_of(pools, first + chunk, first)
        for layer, pool in enumerate(pools):
            k, tokens, at = new(pool, first, chunk)
            view = PrefillView(tokens, at, k, k, valid, cache, queries, asked, last)
            state = policy.prefill(state, layer, view)
        return state

    @partial(jax.jit, donate_argnums=0)
    def take_in(state, pools, first):
        cache = cache_of(pools, first + policy.services.period, first)
        for layer, pool in enumerate(pools):
            k, tokens, at = new(pool, first, policy.services.period)
            state = policy.append(state, layer, k, k, tokens, at, cache)
        return state

    @partial(jax.jit, donate_argnums=0)
    def pack(state, pools, length):
        return policy.services.maintain(state, cache_of(pools, length, length))[0]

    def clocked(call: Callable[[], State]) -> tuple[State, float]:
        began = time.perf_counter()
        state = jax.block_until_ready(call())
        return state, time.perf_counter() - began

    def prompt() -> State:
        state = jax.jit(lambda: policy.init(spec))()
        for first in range(0, context - chunk, chunk):
            state = read(state, pools, first, last=False)
        return jax.block_until_ready(state)

    builds, packings = [], []
    for _ in range(RUNS + 1):
        state = prompt()
        state, seconds = clocked(partial(read, state, pools, context - chunk, last=True))
        builds.append(seconds)
    used, allocated = used_bytes(state), sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for length in range(context, context + room, policy.services.period):
        state = jax.block_until_ready(take_in(state, pools, length))
        state, seconds = clocked(partial(pack, state, pools, length + policy.services.period))
        packings.append(seconds)
    packed = spread(packings[1:])  # the first compiles, of builds too
    return {
        "build_seconds": spread(builds[1:]),
        "packing_seconds": packed,
        "packing_seconds_per_step": packed["median"] / policy.services.period,
        "used_bytes": used,
        "allocated_bytes": allocated,
        "used_share": used / (spec.nbytes / spec.capacity * context),
        "allocated_share": allocated / spec.nbytes,
    }


def of_length(part: str, context: int, expression: str, tiny: bool) -> list[dict[str, Any]]:
    """Measures the index or the prefill of one length in child processes."""
    shared = {"part": part, "context": context}
    if part == "index":
        asked = ["--child", str(context), expression, *["--tiny"] * tiny]
        children = [("bench.lychee_cluster_speed", expression, asked)]
    else:
        children = [
            ("bench.prefill", policy, ["--child", "jsparse", str(context), policy])
            for policy in ("dense", expression)
        ]
    rows = []
    for module, policy, asked in children:
        try:
            found = run_child(module, asked, timeout_s=590)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"error": str(error)[-600:]}
        rows.append({**shared, "policy": policy, **found})
    return rows


def line_of_length(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Formats one line on an index or a prefill; `rows` has the prefill that it is compared to."""
    text = f"{row['part']:10}{row['context']:>7}  {row['policy']}"
    if "error" in row:
        return f"{text}  failed: {row['error'][-300:]}"
    if row["part"] == "prefill":
        return f"{text}  {row['seconds']['median']:.2f} s"
    build = row["build_seconds"]["median"]
    text += f"  built in {build * 1e3:.1f} ms"
    for other in rows:
        if (other["context"], other["policy"]) == (row["context"], "dense") and "seconds" in other:
            text += f", {build / other['seconds']['median']:.1%} of prefill"
    return (
        f"{text}; packing {row['packing_seconds_per_step'] * 1e6:.0f} us per step; "
        f"{row['used_share']:.2%} of the cache used, {row['allocated_share']:.2%} allocated"
    )


def main() -> None:
    """Measures the requested parts and prints a line for each row."""
    parser = report_parser("lychee_cluster_speed", "Time LycheeCluster's attention and its index.")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default all)"
    )
    parser.add_argument("--cases", nargs="+", help="the operator's batch x context, as 8x131072")
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=CONTEXTS, help="lengths of index and prefill"
    )
    parser.add_argument(
        "--budget", type=int, default=BUDGET, help=f"attended tokens (default {BUDGET})"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="one small shape for a CPU and no prefill, to test the script; times mean nothing",
    )
    parser.add_argument(
        "--child", nargs=2, metavar=("CONTEXT", "POLICY"), help="measure one index here"
    )
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.child:
        layers = 2 if args.tiny else LLAMA_8B.num_layers
        print(json.dumps(index_times(int(args.child[0]), args.child[1], layers)))
        return
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not args.tiny:
        parser.error("needs a GPU; --tiny tests the script on a CPU")
    shapes: Sequence[Sequence[int]] = SHAPES
    searched: Sequence[tuple[int, int]] = SEARCHED
    if args.tiny:
        searched = [(2, 4096)]
        shapes, args.contexts, args.budget = [(2, 512)], [512], 256
        args.parts = [part for part in args.parts if part != "prefill"]
    elif args.cases:
        shapes = [numbers(case) for case in args.cases]
        if wrong := [
            text for text, shape in zip(args.cases, shapes, strict=True) if len(shape) != 2
        ]:
            parser.error(f"--cases {wrong[0]}: must be batch x context")
    cases = [AttentionCase(f"{b} x {c}", b, c, dense="all") for b, c in shapes]
    report: dict[str, Any] = {
        "benchmark": "lychee_cluster_speed",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": jax.local_devices()[0].device_kind,
        "environment": describe(allow_modified=args.allow_modified),
        "budget": args.budget,
        "results": [],
    }
    if {"operator", "search"} & set(args.parts):
        nbytes = LEAD_BYTES // 1000 if args.tiny else LEAD_BYTES
        before, settings = lead(nbytes), Settings(calls=40, repeats=3, runs=6)
        rate = bandwidth(before, nbytes, settings, on_gpu=on_gpu)
        report["bandwidth"] = rate._asdict()
        if "operator" in args.parts:
            report["peers"] = peers(cases) if on_gpu else []
            for case in cases:
                rows = operator_rows(case, args.budget, before, rate, settings)
                report["results"] += [{"part": "operator", **row} for row in rows]
                print(*(line(row, report["peers"]) for row in rows), sep="\n", flush=True)
                write_report(args.json, report)
        for shape in searched if "search" in args.parts else ():
            rows = search_rows(*shape, args.budget, before, rate, settings)
            report["results"] += [{"part": "search", **row} for row in rows]
            print(*map(line_of_search, rows), sep="\n", flush=True)
            write_report(args.json, report)
    ours = expressions(args.budget)[OURS]
    for part in ("prefill", "index"):
        for context in args.contexts if part in args.parts else ():
            rows = of_length(part, context, ours, args.tiny)
            report["results"] += rows
            prefills = [row for row in report["results"] if row["part"] == "prefill"]
            print(*(line_of_length(row, prefills) for row in rows), sep="\n", flush=True)
            write_report(args.json, report)


if __name__ == "__main__":
    main()
