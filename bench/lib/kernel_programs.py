"""Builds programs of several calls of attention, for bench.kernels.

A program's calls take turns with their inputs, and each waits for the previous one: an optimisation
barrier makes its inputs depend on the last result, so that XLA neither reorders nor fuses work of
two calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.lib.kernel_cases import HEAD_DIM, KV_HEADS, AttentionCase
from bench.lib.kernel_timing import TimedProgram
from jsparse.cache import Int8Pages, LayerCache
from jsparse.pallas_kernels.block_sparse_decode.api import block_sparse_decode
from jsparse.pallas_kernels.token_sparse_decode.api import token_sparse_decode
from jsparse.selection import MAX_BITS_PAGE, Selection

Contender = Callable[[Any, list[Any]], TimedProgram]
PARTS = 64  # equal parts of a pool: quick to make, and attention reads every one


@dataclass(frozen=True)
class Job:
    """One case of an op.

    Attributes:
        bytes: the bytes that a call must read, plus those written if it writes a similar amount.
        build: makes the inputs shared by all calls, and a list of each call's own.
        contenders: functions that make a program from both; they cache their compiled functions.
        crosses: the path of `bytes`: the device's "memory", or the "bus" to the host's.
        attention: the case, if the op is attention.
    """

    case: str
    bytes: int
    build: Callable[[], tuple[Any, list[Any]]]
    contenders: Mapping[str, Contender]
    crosses: str = "memory"
    attention: AttentionCase | None = None


def in_turn(op: Callable[[Any, Any], Any]) -> Contender:
    """Returns a factory of programs with one call per set of inputs."""

    @jax.jit
    def run(fixed, sets):
        results, out = [], None
        for one in sets:
            one, out = jax.lax.optimization_barrier((one, out))
            out = op(fixed, one)
            results.append(out)
        return results

    return lambda fixed, sets: TimedProgram(lambda: run(fixed, sets), len(sets))


@partial(jax.jit, static_argnums=(1, 2))
def random(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Returns normal numbers, repeated in up to PARTS equal parts along the first axis."""
    parts = min(PARTS, shape[0] & -shape[0])
    part = jax.random.normal(jax.random.key(seed), (shape[0] // parts, *shape[1:]), dtype)
    return jnp.broadcast_to(part, (parts, *part.shape)).reshape(shape)


def cache(case: AttentionCase) -> LayerCache:
    """Returns a full cache."""
    shape = (case.pairs * case.num_pages, case.page, HEAD_DIM)
    bias = jnp.zeros(shape[:2]) if case.bias else None
    k, v = (pool(seed, shape, int8=case.int8) for seed in range(2))
    return LayerCache(k, v, lengths(case), bias=bias)


def pool(seed: int, shape: tuple[int, ...], *, int8: bool) -> jax.Array | Int8Pages:
    """Returns random pages of K (seed 0, with a reach if in 8 bits) or V."""
    if not int8:
        return random(seed, shape)
    values = jnp.clip(jnp.round(37 * random(seed, shape, jnp.float32)), -127, 127)
    scales = jnp.full(shape[:2], 1 / 37, jnp.bfloat16)
    reach = None if seed else jnp.ones((KV_HEADS, HEAD_DIM))
    return Int8Pages(values.astype(jnp.int8), scales, reach, jnp.dtype(jnp.bfloat16))


def lengths(case: AttentionCase) -> jax.Array:
    """Returns the lengths of all heads."""
    return jnp.full((case.batch, KV_HEADS), case.context, jnp.int32)


def inputs(case: AttentionCase, seed: int) -> tuple[jax.Array, jax.Array, Selection]:
    """Returns the inputs of one call: queries, lengths and selection."""
    heads = (case.batch, KV_HEADS)
    ids, dense = case.ids(seed).reshape(*heads, -1), case.dense_heads(seed).reshape(heads)
    bits = None
    if case.bits:
        bits = np.random.default_rng(seed).integers(
            1, 2 ** min(case.page, MAX_BITS_PAGE), ids.shape, np.uint32
        )
    selection = Selection(
        jnp.asarray(ids),
        jnp.asarray(case.counts(seed).reshape(heads)),
        bits=None if bits is None else jnp.asarray(bits),
        dense=jnp.asarray(dense) if dense.any() or case.flags else None,
        granularity=case.lists,
    )
    q = jax.random.normal(jax.random.key(seed), (case.batch, case.heads, HEAD_DIM), jnp.bfloat16)
    return q, lengths(case), selection


def attention_op(case: AttentionCase, implementation: str | None):
    """Returns the op for the case's lists, in the form that `in_turn` takes."""
    op = block_sparse_decode if case.lists == "page" else token_sparse_decode

    def attend(layer: LayerCache, one):
        q, held, selection = one
        return op(
            q,
            layer._replace(lengths=held),
            selection,
            stats=case.stats,
            implementation=implementation,
        )

    return attend


def attention_job(case: AttentionCase, *, on_gpu: bool, max_calls: int) -> Job:
    """Returns the job of a case; on a CPU the reference replaces the kernels."""
    kernels = ["mosaic", "triton"] if case.lists == "page" and not case.int8 else ["triton"]
    names = kernels * on_gpu + ["reference"] * (case.small or not on_gpu)
    return Job(
        case.name,
        case.bytes,
        lambda: (cache(case), [inputs(case, seed) for seed in range(min(case.calls, max_calls))]),
        {name: in_turn(attention_op(case, name)) for name in names},
        attention=case,
    )
