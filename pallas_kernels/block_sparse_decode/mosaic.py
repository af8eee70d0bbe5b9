"""Implements `api.block_sparse_decode` with Mosaic GPU, for Hopper.

One persistent launch attends to the pages of all heads; a second merges the splits.

Each head's pages are cut into tiles of 64 tokens, and its tiles into splits, independently of other
heads (`schedule`). Every team of two warpgroups computes its own equal share of all tiles, rounded
to whole splits. One warpgroup copies pages by TMA and writes the bits of attended tokens
(`producer`); the other multiplies (`consumer`). A report adds the group's mean query to its
queries.
"""

from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_decode import schedule
from jsparse.pallas_kernels.block_sparse_decode.consumer import consume
from jsparse.pallas_kernels.block_sparse_decode.problem import Problem
from jsparse.pallas_kernels.block_sparse_decode.producer import produce
from jsparse.pallas_kernels.block_sparse_decode.refs import GlobalRefs, SharedRefs, shared_types
from jsparse.pallas_kernels.block_sparse_decode.schedule import Tiles
from jsparse.pallas_kernels.merge_splits.api import merge_splits
from jsparse.pallas_kernels.place_logits.api import place_logits
from jsparse.selection import Selection
from jsparse.selection.partials import AttentionOut, MeanStatsKind, Stats


def block_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float,
    stats: MeanStatsKind | None,
    dtype: DTypeLike = jnp.float32,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> AttentionOut:
    """Implements `api.block_sparse_decode` with Mosaic GPU.

    `tiles` overrides the table of `schedule`. `interpret` runs the kernel on any machine, slowly,
    for tests.
    """
    batch, heads, head_dim = q.shape
    pairs = layer.lengths.size
    group = batch * heads // pairs
    mixed = selection.dense is not None and selection.ids.shape[-1] > 0
    problem = Problem(
        pairs=pairs,
        group=group,
        head_dim=head_dim,
        page_size=layer.page_size,
        num_pages=layer.num_pages,
        capacity=selection.ids.shape[-1],
        has_bits=selection.bits is not None and selection.ids.shape[-1] > 0,
        has_dense=selection.dense is not None,
        has_table=layer.block_table is not None,
        has_bias=layer.bias is not None,
        logits=stats is not None,
        dtype=layer.k.dtype,
        scale=sm_scale,
        tiles=schedule.tiles(head_dim, mixed) if tiles is None else tiles,
        interpret=interpret,
    )
    grouped = q.reshape(pairs, group, head_dim).astype(layer.k.dtype)
    if stats is not None:
        mean = jnp.mean(grouped, axis=1, keepdims=True, dtype=jnp.float32)
        grouped = jnp.concatenate([mean.astype(grouped.dtype), grouped], axis=1)
    # fill whole tiles of shared memory, with several heads or with zeros
    if problem.heads_a_window == 1:
        grouped = jnp.pad(grouped, ((0, 0), (0, problem.columns - problem.queries), (0, 0)))
    queries = grouped.reshape(-1, problem.columns, head_dim)
    # in the order of GlobalRefs
    operands = [queries, layer.k, layer.v, layer.lengths.reshape(-1), selection.count.reshape(-1)]
    if selection.dense is not None:
        operands.append(selection.dense.reshape(-1).astype(jnp.int32))
    if problem.capacity:
        operands.append(selection.ids.reshape(pairs, -1))
    if problem.has_bits and selection.bits is not None:
        operands.append(lax.bitcast_convert_type(selection.bits, jnp.int32).reshape(pairs, -1))
    if layer.block_table is not None:
        operands.append(layer.block_table.reshape(pairs, -1))
    if layer.bias is not None:
        operands.append(layer.bias)
    o, lse, splits, *logits = _kernel(problem)(*operands)
    o, lse = merge_splits(
        o, lse, splits, problem.queries, lse_only=problem.queries - group, dtype=dtype
    )
    out, out_lse = o.reshape(q.shape), lse[:, -group:].reshape(batch, heads)
    if stats is None:
        return AttentionOut(out, out_lse)
    mean_lse = lse[:, 0].reshape(layer.lengths.shape)
    return AttentionOut(out, out_lse, _stats(logits[0], mean_lse, layer, selection, stats))


@cache
def _kernel(problem: Problem):
    """Builds the launch.

    It returns o and lse per split, the number of splits per head, and the mean query's logits if
    requested.
    """
    p, t = problem, problem.tiles
    splits = schedule.max_splits(p.max_tiles, t)
    out = [
        jax.ShapeDtypeStruct((p.pairs, splits, p.queries, p.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((p.pairs, splits, p.queries), jnp.float32),
        jax.ShapeDtypeStruct((p.padded_pairs,), jnp.int32),
    ]
    if p.logits:
        out.append(jax.ShapeDtypeStruct((p.pairs, p.max_tiles * schedule.TOKENS), jnp.float32))

    def body(*refs, **scratch):
        g, s = GlobalRefs.of(p, refs), SharedRefs(**scratch)

        # two teams, each 128 threads with 208 and 128 with 40, use 63,488 of 65,536 registers
        @pl.when(lax.axis_index("warpgroup") < t.teams)
        def _():
            plgpu.set_max_registers(208, action="increase")
            consume(p, g, s)

        @pl.when(lax.axis_index("warpgroup") >= t.teams)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            produce(p, g, s)

    body.__name__ = "block_sparse_decode"
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=shared_types(p),
        grid=(t.blocks,),
        grid_names=("block",),
        num_threads=2 * t.teams,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if p.interpret else None,
    )


def _stats(
    logits: Float32[Array, "pairs slots"],
    lse: Float32[Array, "B K"],
    layer: LayerCache,
    selection: Selection,
    stats: MeanStatsKind,
) -> Stats:
    """Moves the mean query's logits from tile order to page order."""
    pages, size = layer.num_pages, layer.page_size
    scores = place_logits(
        logits, selection, layer.lengths, stats=stats, num_pages=pages, page_size=size
    )
    return Stats(scores, lse)
