"""How long does attention to one new token take on a CPU, for full, exact top-k and predicted sets?

One layer of Llama 3.1 8B's shape in float32, one row or as many as --batch says. Milliseconds of a
step that writes the new tokens' K and V and attends, everything jitted with donated arrays, on one
core and on all:

    full        every key and value, each read once per group of query heads
    repeated    the same after K and V were repeated for all query heads, as eager Hugging Face does
    top-k       the exact top 2 %: the logits of all keys, the tokens of largest weight in a group
    quest       the policy at 2 % of the tokens, its page bounds brought up to date
    quest-paper the same with slack=1 and group="max", as Quest's paper ranks pages
    lfps        the policy at 2 %: candidates from the tables, attention, the tables' update
    lfps-exact  the same with exact=True: exact weights choose among 6 %
    lfps-paper  the same with the paper's rule, penalty and alignment; no more than 6 % are listed,
                and how many the rule marks depends on the text, here on tables of random queries

Keys, values and queries are random, and all rows hold the same K and V in memory of their own:
right for speed, never for quality. "full" and "top-k" are the fastest that we found in plain JAX.
Each contender runs in a process of its own, which is bound to its cores, distinct physical ones
first, before it imports jax; XLA's thread pool has as many threads (NPROC). The paper of LFPS
(arXiv:2506.15704, section 5 and Figure 5) compares on one core of a Xeon Gold 6430: 22.8x full
attention at 128K, 4.3x, 8.1x and 14.7x exact top-k at 4K, 16K and 64K, 9.6x in its abstract, 2x
Quest at 128K; on 8 cores of a Xeon Platinum 8457C 1.5x Quest at 8 rows, at no named length. It
names no budget for its speed; its quality is measured at 2 %.

    python -m bench.cpu_attention --json build/cpu_attention.json
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import available_cores, describe
from bench.lib.subprocesses import run_child, spread, write_report
from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView, append, init, read_heads
from jsparse.hooks import PrefillView, State
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.partials import softmax_partial
from jsparse.policies.expressions import parse
from jsparse.policies.lfps import share_of
from jsparse.policy import Policy
from jsparse.runtime.decode_step import attend_layer
from jsparse.selection import Selection
from jsparse.shapes import Queries
from jsparse.threshold import ordered, top_k_ids

OTHERS = ("full", "repeated", "top-k", "quest", "quest-paper")
CONTENDERS = (*OTHERS, "lfps", "lfps-exact", "lfps-paper")
CONTEXTS = tuple(1024 * n for n in (4, 8, 16, 32, 64, 128))
PAGE, SHARE = 16, 0.02
# runs go on until both are reached, or the most
MIN_RUNS, SECONDS, MAX_RUNS, WARM_UPS = 5, 1.0, 50, 3
# speed over full attention and over exact top-k on one core, by context
PAPER = {
    "full": {131072: 22.8},
    "top-k": {4096: 4.3, 16384: 8.1, 65536: 14.7},
    "quest-paper": {131072: 2.0},
}


class Shape(NamedTuple):
    """Holds the sizes of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA, TINY = Shape(32, 8, 128), Shape(4, 2, 16)

# What a contender does with a cache that holds the new token.
ContenderFn = Callable[[State, KVCache, Queries, Array, Array], tuple[Array, State]]


def keys_and_values(cache: KVCache) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Returns K and V of the only layer."""
    held = cache.layers[0]
    return read_heads(held.k, held), read_heads(held.v, held)


def grouped_logits(q: Queries, held: LayerCache) -> Float32[Array, "B K G S"]:
    """Returns the logits of all slots, -inf past the length.

    Slots come before query heads, which XLA's product for a CPU takes less time for; a sum of
    products was no faster.
    """
    grouped = q.reshape(*held.lengths.shape, -1, q.shape[-1])
    logits = jnp.einsum("bksh,bkgh->bksg", read_heads(held.k, held), grouped).swapaxes(2, 3)
    inside = jnp.arange(held.capacity) < held.lengths[..., None, None]
    return jnp.where(inside, logits * q.shape[-1] ** -0.5, -jnp.inf)


def full(state: State, cache: KVCache, q: Queries, k: Array, v: Array) -> tuple[Array, State]:
    """Attends to everything, each key and value read once."""
    held = cache.layers[0]
    weights, total, _ = softmax_partial(grouped_logits(q, held))
    o = jnp.einsum("bkgs,bksh->bkgh", weights, read_heads(held.v, held))
    return (o / total[..., None]).reshape(q.shape), state


def repeated(state: State, cache: KVCache, q: Queries, k: Array, v: Array) -> tuple[Array, State]:
    """Attends to everything, with K and V written out for each query head first."""
    held = cache.layers[0]
    group = q.shape[1] // held.lengths.shape[1]
    # the barrier keeps XLA from reading the copies' source instead
    keys, values = jax.lax.optimization_barrier(
        tuple(jnp.repeat(x, group, axis=1) for x in keys_and_values(cache))
    )
    logits = jnp.einsum("bnh,bnsh->bns", q, keys) * q.shape[-1] ** -0.5
    inside = jnp.arange(held.capacity) < jnp.repeat(held.lengths, group, axis=1)[..., None]
    weights = jax.nn.softmax(jnp.where(inside, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bns,bnsh->bnh", weights, values), state


def top_k(
    share: float, state: State, cache: KVCache, q: Queries, k: Array, v: Array
) -> tuple[Array, State]:
    """Attends to the tokens of largest weight in any query head of a group."""
    held = cache.layers[0]
    number = share_of(share, held.capacity)
    weights, total, _ = softmax_partial(grouped_logits(q, held))
    best = jnp.max(weights / total[..., None], axis=2)
    wanted = jnp.full(held.lengths.shape, number)
    chosen = Selection(*top_k_ids(ordered(best), wanted, number), granularity="token")
    return token_sparse_decode(q, held, chosen, dtype=q.dtype).o, state


def by_policy(
    policy: Policy, state: State, cache: KVCache, q: Queries, k: Array, v: Array
) -> tuple[Array, State]:
    """Attends as a policy says, with all that a decode step lets the policy do in a layer."""
    view, at = StepView(cache), cache.positions[:, None]
    state = policy.append(state, 0, k, v, 0 * at, at, view)
    out, state, _ = attend_layer(policy, 0, q, view, state)
    return out.o, policy.update(state, 0, out.stats, view)


def contender(name: str, context: int, share: float) -> tuple[ContenderFn, Policy | None]:
    """Returns what a contender does, and its policy if it has one."""
    if name == "full":
        return full, None
    if name == "repeated":
        return repeated, None
    if name == "top-k":
        return partial(top_k, share), None
    pages = max(round(share * context / PAGE), 1)
    expression = {
        "quest": f"quest(budget={pages * PAGE})",
        "quest-paper": f"quest(budget={pages * PAGE}, slack=1, group='max')",
        "lfps": f"lfps(budget={share})",
        "lfps-exact": f"lfps(budget={share}, exact=True)",
        "lfps-paper": f"lfps(budget={share}, exact=True, candidates='threshold', penalty=0.5, "
        "aligned=False)",
    }[name]
    policy = parse(expression)
    return partial(by_policy, policy), policy


class Layer(NamedTuple):
    """Holds a layer after a prompt, and what the next steps bring: [steps, B, 1, heads, H]."""

    cache: KVCache
    state: State
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def after_prompt(
    shape: Shape, context: int, steps: int, policy: Policy | None, batch: int = 1
) -> Layer:
    """Fills a layer with random tokens such that each row holds `context` after all steps.

    Rows are copies of the first, since random numbers for all take a core longer than the steps.
    """
    heads, dim = shape.num_kv_heads, shape.head_dim
    pages = -(-context // PAGE)
    spec = CacheSpec(1, batch, shape.num_heads, heads, dim, PAGE, pages, jnp.float32)
    rng = np.random.default_rng(0)  # in numpy, which compiles nothing
    held = init(spec).layers[0]
    lengths = jnp.full_like(held.lengths, context - steps)
    one_row = held.k.shape[0] // batch, *held.k.shape[1:]
    k, v = (np.tile(rng.standard_normal(one_row, np.float32), (batch, 1, 1)) for _ in "kv")
    held = LayerCache(jnp.array(k), jnp.array(v), lengths)
    cache = KVCache((held,), lengths[:, 0], jnp.zeros(batch, jnp.bool_))
    state = (
        () if policy is None else jax.jit(partial(take_in, policy, spec))(cache, jax.random.key(0))
    )
    return Layer(
        cache,
        state,
        rng.standard_normal((steps, batch, shape.num_heads, dim), np.float32),
        rng.standard_normal((steps, batch, 1, heads, dim), np.float32),
        rng.standard_normal((steps, batch, 1, heads, dim), np.float32),
    )


def take_in(policy: Policy, spec: CacheSpec, cache: KVCache, key: Array) -> State:
    """Returns a policy's state after the prompt that the cache holds, one chunk."""
    keys, values = (x.swapaxes(1, 2) for x in keys_and_values(cache))
    at = jnp.broadcast_to(jnp.arange(spec.capacity, dtype=jnp.int32), keys.shape[:2])
    queries = jax.random.normal(key, (spec.batch, policy.window, spec.num_heads, spec.head_dim))
    seen = jnp.minimum(cache.positions, policy.window)
    chunk = 0 * at, at, keys, values, cache.positions
    view = PrefillView(*chunk, StepView(cache), queries, seen, True)
    return policy.prefill(policy.init(spec), 0, view)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def step(
    attend: ContenderFn, cache: KVCache, state: State, q: Queries, k: Array, v: Array
) -> tuple[Array, KVCache, State]:
    """Writes a token's K and V and attends from it."""
    cache = append(cache, 0, k, v, cache.positions[:, None], jnp.ones_like(cache.positions))
    out, state = attend(state, cache, q, k, v)
    return out, cache._replace(positions=cache.positions + 1), state


def steps(
    name: str, shape: Shape, context: int, share: float, max_steps: int, batch: int = 1
) -> Iterator[tuple[Array, float]]:
    """Runs a contender for up to `max_steps` steps; yields each one's output and its seconds."""
    attend, policy = contender(name, context, share)
    layer = after_prompt(shape, context, max_steps, policy, batch)
    cache, state = layer.cache, layer.state
    for given in zip(layer.q, layer.k, layer.v, strict=True):
        new = jax.device_put(given)
        jax.block_until_ready((new, cache, state))
        began = time.perf_counter()
        out, cache, state = jax.block_until_ready(step(attend, cache, state, *new))
        yield out, time.perf_counter() - began


def measure(name: str, shape: Shape, context: int, share: float, batch: int) -> dict[str, Any]:
    """Times a contender at one context and number of rows in this process."""
    times: list[float] = []
    max_steps = WARM_UPS + MAX_RUNS
    for nth, (_, seconds) in enumerate(steps(name, shape, context, share, max_steps, batch)):
        if nth >= WARM_UPS:
            times.append(1e3 * seconds)
        if len(times) >= MIN_RUNS and sum(times) >= 1e3 * SECONDS:
            break
    of_all = {"cores": available_cores(), "name": name, "batch": batch, "context": context}
    return of_all | {"runs": len(times), "ms": spread(times)}


def distinct_first(cores: Iterable[int]) -> list[int]:
    """Orders cores such that those that share a physical core with an earlier one come last.

    Otherwise the last come first, since the first serves most interrupts.
    """
    firsts: list[int] = []
    others: list[int] = []
    seen: set[str] = set()
    for core in sorted(cores, reverse=True):
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = path.read_text() if path.is_file() else str(core)
        (others if siblings in seen else firsts).append(core)
        seen.add(siblings)
    return firsts + others


@contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Binds this process, and those that it starts meanwhile, to `number` of its cores."""
    before, variables = os.sched_getaffinity(0), dict(os.environ)
    os.sched_setaffinity(0, distinct_first(before)[:number])
    os.environ.update(NPROC=str(number), JAX_PLATFORMS="cpu")
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for name in ("NPROC", "JAX_PLATFORMS"):
            os.environ.pop(name, None)
            os.environ.update({name: variables[name]} if name in variables else {})


def speedups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares both kinds of LFPS with the other contenders; ratios are their time over ours."""
    ms = {(r["cores"], r["batch"], r["context"], r["name"]): r["ms"]["median"] for r in rows}
    return [
        {"cores": cores, "batch": batch, "context": context, "name": name}
        | {
            other: ms[cores, batch, context, other] / own
            for other in OTHERS
            if (cores, batch, context, other) in ms
        }
        for (cores, batch, context, name), own in ms.items()
        if name.startswith("lfps")
    ]


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table of times, a row per context and number of cores and rows."""
    names = [name for name in CONTENDERS if any(r["name"] == name for r in rows)]
    table = Table("cores", "rows", "context", *(f"{name} ms" for name in names))
    cells: dict[tuple[int, int, int], dict[str, str]] = {}
    for r in rows:
        ms = r["ms"]
        text = f"{ms['median']:.2f} ({ms['min']:.2f}-{ms['max']:.2f})"
        cells.setdefault((r["cores"], r["batch"], r["context"]), {})[r["name"]] = text
    for key, texts in cells.items():
        table.add_row(*map(str, key), *(texts.get(name, "") for name in names))
    return table


def ratios_of(compared: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table of speedups, the paper's beside those of one row on one core."""
    others = OTHERS
    table = Table("cores", "rows", "context", "", *(f"over {name}" for name in others))
    for r in compared:
        texts = []
        for name in others:
            alone = r["cores"] == r["batch"] == 1
            paper = PAPER.get(name, {}).get(r["context"]) if alone else None
            own = f"{r[name]:.1f}x" if name in r else ""
            texts.append(f"{own} (paper {paper}x)" if own and paper else own)
        shape = (str(r[key]) for key in ("cores", "batch", "context"))
        table.add_row(*shape, r["name"], *texts)
    return table


def main() -> None:
    """Runs every contender and prints both tables, or with --child one contender."""
    parser = report_parser("cpu_attention", "Time attention to one new token on this CPU.")
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="contenders (default all)"
    )
    parser.add_argument(
        "--context", nargs="+", type=int, default=CONTEXTS, help="tokens held (default 4K to 128K)"
    )
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1], help="numbers of rows (default 1)"
    )
    parser.add_argument(
        "--share", type=float, default=SHARE, help="part of the tokens attended to (default 0.02)"
    )
    parser.add_argument(
        "--cores", nargs="+", type=int, help="numbers of cores (default 1 and all available)"
    )
    parser.add_argument("--tiny", action="store_true", help="use a tiny layer instead of Llama's")
    parser.add_argument(
        "--child", choices=CONTENDERS, help="measure only this one here and print a JSON line"
    )
    args = parser.parse_args()
    min_steps, available = 2 * (WARM_UPS + MAX_RUNS), available_cores()
    if any(n < min_steps for n in args.context):
        parser.error(f"--context {args.context}: must be at least {min_steps}")
    if any(n < 1 for n in args.batch):
        parser.error(f"--batch {args.batch}: must be at least 1")
    if not 0 < args.share <= 1:
        parser.error(f"--share {args.share}: must be above 0 and at most 1")
    cores = args.cores or sorted({1, available})
    if not all(1 <= n <= available for n in cores):
        parser.error(f"--cores {cores}: must be from 1 to {available}, those available")
    if args.child:
        if jax.default_backend() != "cpu":
            parser.error(f"--child {args.child}: must run with JAX_PLATFORMS=cpu")
        shape = TINY if args.tiny else LLAMA
        sizes = [(context, batch) for batch in args.batch for context in args.context]
        found = [measure(args.child, shape, n, args.share, batch) for n, batch in sizes]
        print(json.dumps(found))
        return
    settings = {"shape": (TINY if args.tiny else LLAMA)._asdict(), "dtype": "float32"}
    settings |= {"share": args.share, "page_size": PAGE, "warm_ups": WARM_UPS, "paper": PAPER}
    report = {
        "benchmark": "cpu_attention",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": settings,
    }
    report["results"] = rows = []
    given = ["--share", str(args.share), "--context", *map(str, args.context)]
    given += ["--batch", *map(str, args.batch)]
    given += ["--tiny"] if args.tiny else []
    for number in cores:
        for name in args.only:
            with on_cores(number):
                measured = run_child("bench.cpu_attention", [*given, "--child", name])
            rows += measured
            report["speedups"] = speedups(rows)
            write_report(args.json, report)
    console = Console(width=160)
    console.print(table_of(rows), ratios_of(speedups(rows)))


if __name__ == "__main__":
    main()
