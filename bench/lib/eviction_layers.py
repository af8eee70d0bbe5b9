"""Builds jobs of one layer for bench.eviction_speed: attention over short heads, and compression.

Attention's calls take turns with layers, more of them than a cache holds, and so do the parts of a
compression. A whole compression is the policy's own `maintain` on a few layers at once, jitted and
donated as in a session; its times are divided by their number.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.lib.kernel_cases import HEAD_DIM, ITEM_BYTES, KV_HEADS, ROTATED_BYTES
from bench.lib.kernel_ops import compaction
from bench.lib.kernel_programs import Contender, Job, random
from bench.lib.kernel_timing import TimedProgram
from bench.lib.replay import lengths_kept, spread_evenly
from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode, mosaic, schedule
from jsparse.pallas_kernels.window_attention import window_attention
from jsparse.policies.eviction import budgets as rules
from jsparse.policies.eviction.compression import best
from jsparse.policies.eviction.merging import merged_slot
from jsparse.policies.eviction.window import mean_query
from jsparse.policies.expressions import parse
from jsparse.selection import Selection, everything

HEADS, PAGE = 32, 16
ROW = 2 * HEAD_DIM * ITEM_BYTES  # bytes of K and V of a slot


@dataclass(frozen=True)
class LayerSizes:
    """Holds the sizes of a policy's layer.

    Attributes:
        capacity: the slots that a head has room for.
        cap, floor: the most and the least that a compression leaves.
        period: the slots that come to it until the next.
        window, sink: those of the policy.
        prompt: the tokens of the dense baseline's heads.
        layers: the layers of a program that compresses.
    """

    capacity: int = 2304
    cap: int = 2048
    floor: int = 512
    period: int = 128
    window: int = 32
    sink: int = 4
    prompt: int = 131072
    layers: int = 4

    @property
    def max_slots(self) -> int:
        """Returns the most slots that a head comes to hold."""
        return self.cap + self.period

    def policy(self, budget: int, **options: Any) -> str:
        """Returns the expression of hard_kv with these sizes."""
        given = {"budget": budget, "floor": self.floor, "cap": self.cap, "period": self.period}
        given |= {"window": self.window, "sink": self.sink, **options}
        return f"hard_kv({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def replayed_lengths(batch: int, layer: int, sizes: LayerSizes) -> np.ndarray:
    """Returns lengths of a layer's heads [B, K] as they were on SmolLM2, within `sizes`."""
    shape = (batch, KV_HEADS)
    lengths = spread_evenly(lengths_kept(), layer, shape) * sizes.cap // LayerSizes.cap
    return np.clip(lengths, sizes.floor, sizes.cap).astype(np.int32)


def mixed_lengths(batch: int, seed: int, sizes: LayerSizes) -> np.ndarray:
    """Returns lengths [B, K] at equal steps from the least to the most that heads hold."""
    steps = np.linspace(sizes.floor, sizes.max_slots, batch * KV_HEADS).round().astype(np.int32)
    return np.random.default_rng(seed).permutation(steps).reshape(batch, KV_HEADS)


def pools(batch: int, slots: int, seed: int, *, bias: bool) -> LayerCache:
    """Returns a layer of random K and V whose heads are full."""
    shape = (batch * KV_HEADS * slots // PAGE, PAGE, HEAD_DIM)
    return LayerCache(
        random(2 * seed, shape),
        random(2 * seed + 1, shape),
        jnp.full((batch, KV_HEADS), slots, jnp.int32),
        bias=jnp.zeros(shape[:2]) if bias else None,
    )


def over_layers(op: Callable[..., Any]) -> Contender:
    """Returns a maker of programs with one call for each of the sets, over the layers in turn.

    A set begins with the lengths of the heads. Each call waits for the one before.
    """

    @jax.jit
    def run(layers, sets):
        results, out = [], None
        for one, layer in zip(sets, itertools.cycle(layers), strict=False):
            (lengths, *rest), out = jax.lax.optimization_barrier((one, out))
            out = op(layer._replace(lengths=lengths), *rest)
            results.append(out)
        return results

    return lambda layers, sets: TimedProgram(lambda: run(layers, sets), len(sets))


def attention_jobs(batch: int, sizes: LayerSizes, *, on_gpu: bool) -> list[Job]:
    """Returns the jobs of attention over heads of mixed length, with bias and without.

    On a GPU, tilings other than the kernel's own are timed too.
    """
    nbytes = int(mixed_lengths(batch, 0, sizes).sum()) * ROW
    copies = max(-(-ROTATED_BYTES // nbytes), 1) if on_gpu else 1
    calls = max(copies, 4)

    def attend(layer, q, selection, tiles=None):
        if tiles is None:
            return block_sparse_decode(q, layer, selection, dtype=q.dtype).o
        return mosaic.block_sparse_decode(
            *(q, layer, selection),
            sm_scale=HEAD_DIM**-0.5,
            stats=None,
            dtype=q.dtype,
            tiles=tiles,
        ).o

    contenders = {"as it is": over_layers(attend)}
    if on_gpu:
        own = schedule.tiles(HEAD_DIM)
        for name, tiles in {
            "2 tiles per split": own._replace(min_tiles=2),
            "8 tiles per split": own._replace(min_tiles=8),
        }.items():
            contenders[name] = over_layers(partial(attend, tiles=tiles))

    def build(bias: bool):
        layers = [pools(batch, sizes.capacity, i, bias=bias) for i in range(copies)]
        return layers, [attending(mixed_lengths(batch, seed, sizes), seed) for seed in range(calls)]

    return [
        Job(f"attention, batch {batch}{text}", nbytes, partial(build, bias), contenders)
        for bias, text in ((False, ""), (True, ", bias"))
    ]


def dense_job(batch: int, sizes: LayerSizes) -> Job:
    """Returns the job of dense attention over the prompt."""
    full = np.full((batch, KV_HEADS), sizes.prompt, np.int32)

    def attend(layer, q, selection):
        return block_sparse_decode(q, layer, selection, dtype=q.dtype).o

    def build():
        return [pools(batch, sizes.prompt, 0, bias=False)], [attending(full, i) for i in range(4)]

    nbytes = int(full.sum()) * ROW
    return Job(f"dense, batch {batch}", nbytes, build, {"dense": over_layers(attend)})


def attending(lengths: np.ndarray, seed: int) -> tuple[jax.Array, jax.Array, Selection]:
    """Returns the set of one call of attention to everything.

    The selection is made here: in the program it would be a launch that no call has to itself.
    """
    held = jnp.asarray(lengths)
    return held, queries(len(lengths), seed), everything(held)


def queries(batch: int, seed: int) -> jax.Array:
    """Returns random queries of one step."""
    return jax.random.normal(jax.random.key(seed), (batch, HEADS, HEAD_DIM), jnp.bfloat16)


def ring(batch: int, seed: int, sizes: LayerSizes) -> jax.Array:
    """Returns random queries of a window."""
    shape = (batch, sizes.window, HEADS, HEAD_DIM)
    return jax.random.normal(jax.random.key(100 + seed), shape, jnp.bfloat16)


def compression_jobs(batch: int, sizes: LayerSizes) -> list[Job]:
    """Returns the jobs of whole compressions; their times and bytes are those of all layers."""
    worst = np.full((batch, KV_HEADS), sizes.max_slots, np.int32)
    # heads lose a period of slots, on average where they share them; or those of a trace gain and
    # lose as many
    wanted = {
        f"{budgets}{', merge' * merge}": (
            sizes.policy(
                sizes.cap,
                budgets=budgets,
                merge=merge,
                # a budget at the cap would leave nothing to share out
                cap=sizes.max_slots if budgets == "joint" else sizes.cap,
            ),
            worst,
        )
        for budgets, merge in (
            ("uniform", False),
            ("joint", False),
            ("joint", True),
            ("calibrated", True),
        )
    }
    typical = replayed_lengths(batch, 0, sizes)
    wanted["replayed, merge"] = sizes.policy(sizes.cap // 2), typical + sizes.period
    jobs = []
    for name, (policy, lengths) in wanted.items():
        kept = typical if name.startswith("replayed") else np.minimum(lengths, sizes.cap)
        # K is scored; what is kept is read and written, K and V
        nbytes = (int(lengths.sum()) // 2 + 2 * int(kept.sum())) * ROW * sizes.layers
        contender = compressing(policy, lengths, sizes)
        jobs.append(
            Job(f"compression, batch {batch}", nbytes, lambda: (None, []), {name: contender})
        )
    return jobs


def compressing(expression: str, lengths: np.ndarray, sizes: LayerSizes) -> Contender:
    """Returns a maker of programs that compress layers of these lengths, again and again."""
    policy, batch = parse(expression), lengths.shape[0]
    no_row = jnp.zeros(batch, jnp.bool_)

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(state, layers, lengths, positions):
        layers = tuple(layer._replace(lengths=lengths) for layer in layers)
        view = StepView(KVCache(layers, positions, no_row))
        state, cache = policy.services.maintain(state, view)
        # the lengths are given anew each time, so nothing of theirs is carried on
        return (
            state,
            tuple(layer._replace(lengths=None) for layer in cache.layers),
            [layer.lengths for layer in cache.layers],
        )

    def start(_, __) -> TimedProgram:
        layers = tuple(
            pools(batch, sizes.capacity, i, bias="bias" in policy.fields)._replace(lengths=None)
            for i in range(sizes.layers)
        )
        spec = CacheSpec(
            *(sizes.layers, batch, HEADS, KV_HEADS, HEAD_DIM, PAGE),
            *(sizes.capacity // PAGE, jnp.bfloat16),
        )
        state = tuple(
            entry._replace(ring=ring(batch, i, sizes)) for i, entry in enumerate(policy.init(spec))
        )
        held, given = [state, layers], jnp.asarray(lengths)
        positions = jnp.full(batch, sizes.prompt, jnp.int32)

        def step():
            held[0], held[1], out = run(held[0], held[1], given, positions)
            return out

        return TimedProgram(step, 1)

    return start


def part_jobs(batch: int, sizes: LayerSizes, *, on_gpu: bool) -> list[Job]:
    """Returns the jobs of a compression's parts, each alone."""
    slots = sizes.max_slots
    scored = batch * KV_HEADS * slots
    # one layer is enough where it is larger than a cache
    copies = 4 if on_gpu else 1
    first, room = sizes.sink, sizes.cap - sizes.sink - sizes.window
    bounds = rules.CountBounds(sizes.floor, room, room)

    def competing(layer):
        at = jnp.arange(layer.capacity, dtype=jnp.int32)
        return (at >= first) & (at < layer.lengths[..., None] - sizes.window)

    def window(layer, queries, positions, *_):
        return window_attention(queries, positions, layer, competing(layer))

    def merge(layer, queries, positions, scores):
        lowest = scores < 0.05  # about as many as a period's slots
        mean = mean_query(queries, positions, KV_HEADS)
        return merged_slot(layer, competing(layer) & lowest, mean)

    def counting(rule):
        def count(layer, _, __, scores):
            none = jnp.zeros(scores.shape[:2])
            return rule(scores, competing(layer), none, lambda: rules.Attended(scores, none))[0]

        return count

    def listing(layer, _, __, scores):
        ranked = jnp.where(competing(layer), scores, -jnp.inf)
        return best(ranked, jnp.minimum(layer.lengths, room), room)

    counts = {
        # half of what the caps allow: with all of it there is nothing to search for
        "joint": rules.joint(bounds._replace(budget=room // 2)),
        "n_star": rules.n_star(bounds, 0.9),
        "calibrated": rules.calibrated(bounds, 0.9, jnp.log),
    }
    timed: dict[str, tuple[int, Callable[..., Any]]] = {
        "window attention": (scored * ROW // 2, window),
        **{f"counts, {name}": (4 * scored, counting(rule)) for name, rule in counts.items()},
        "list of the best": (4 * scored, listing),
        "merged slot": (scored * ROW, merge),
    }

    def build():
        layers = [pools(batch, sizes.capacity, i, bias=True) for i in range(copies)]
        lengths = jnp.full((batch, KV_HEADS), slots, jnp.int32)
        positions = jnp.full(batch, sizes.prompt, jnp.int32)
        shape = (batch, KV_HEADS, sizes.capacity)
        sets = [
            (
                lengths,
                ring(batch, i, sizes),
                positions,
                jax.random.uniform(jax.random.key(i), shape),
            )
            for i in range(4)
        ]
        return layers, sets

    jobs = [
        Job(f"part, batch {batch}", nbytes, build, {name: over_layers(op)})
        for name, (nbytes, op) in timed.items()
    ]
    compact = compaction("triton" if on_gpu else "reference", batch, slots, sizes.cap)
    return [*jobs, replace(compact, case=f"part, batch {batch}", contenders=renamed(compact))]


def renamed(job: Job) -> dict[str, Contender]:
    """Returns a job's only contender under the name of what it does here."""
    (contender,) = job.contenders.values()
    return {"compact_pages": contender}


def per_layer(rows: Sequence[dict[str, Any]], layers: int) -> list[dict[str, Any]]:
    """Returns the rows of whole compressions, bytes, times and launches those of one layer.

    The times by kernel stay those of all layers; their order is left out.
    """

    def share(value: Any) -> Any:
        return (
            {name: share(x) for name, x in value.items()}
            if isinstance(value, dict)
            else (value / layers)
        )

    divided = (
        "bytes",
        "floor_us",
        "floor_at_4400_us",
        "wall",
        "device",
        "kernels",
        "us",
        "launches",
    )
    shared = []
    for row in rows:
        kept = {name: value for name, value in row.items() if name != "order"}
        own = {name: share(row[name]) for name in divided if name in row}
        shared.append(kept | own | {"layers": layers})
    return shared
