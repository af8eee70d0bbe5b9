# pyright: reportAbstractUsage=false
"""Implements `api.block_sparse_decode` with Mosaic GPU, for Hopper and later.

One persistent launch covers the pages of all heads, a second one merges the splits.

Each head's pages are cut into tiles of 64 tokens and these, by a rule that knows nothing of other
heads, into splits (`schedule`). Every team of two warpgroups takes an equal share of all tiles,
rounded to whole splits, which it finds by itself: one copies pages by TMA and writes down which
tokens of a tile count (`producer`), the other multiplies (`consumer`). The mean query of a group,
where asked for, is one more row of the padded product.
"""

from functools import cache, partial

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
from jsparse.pallas_kernels.block_sparse_decode.problem import BIAS_ROW, M, Problem
from jsparse.pallas_kernels.block_sparse_decode.producer import produce
from jsparse.pallas_kernels.block_sparse_decode.schedule import Tiles
from jsparse.pallas_kernels.merge_splits.api import merge_splits
from jsparse.pallas_kernels.place_logits.api import place_logits
from jsparse.partials import AttentionOut, MeanStatsKind, Stats
from jsparse.selection import Selection


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
    """Implement `api.block_sparse_decode` with Mosaic GPU.

    `tiles` overrides the table of `schedule`; `interpret` runs on any machine, slowly, for tests.
    """
    batch, heads, head_dim = q.shape
    pairs = layer.lengths.size
    group = batch * heads // pairs
    mixed = selection.dense is not None and selection.ids.shape[-1] > 0
    problem = Problem(
        pairs,
        group,
        head_dim,
        layer.page_size,
        layer.num_pages,
        selection.ids.shape[-1],
        selection.bits is not None and selection.ids.shape[-1] > 0,
        selection.dense is not None,
        layer.block_table is not None,
        layer.bias is not None,
        stats is not None,
        layer.k.dtype,
        sm_scale,
        schedule.tiles(head_dim, mixed) if tiles is None else tiles,
        interpret,
    )
    grouped = q.reshape(pairs, group, head_dim).astype(layer.k.dtype)
    if stats is not None:
        mean = jnp.mean(grouped, axis=1, keepdims=True, dtype=jnp.float32)
        grouped = jnp.concatenate([mean.astype(grouped.dtype), grouped], axis=1)
    # rows fill whole tiles of shared memory, by several heads or by zeros
    if problem.heads_a_window == 1:
        grouped = jnp.pad(grouped, ((0, 0), (0, problem.rows - problem.queries), (0, 0)))
    queries = grouped.reshape(-1, problem.rows, head_dim)
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
    """Build the launch.

    It returns o and lse of each split, the splits of each head, and the mean query's logits if they
    are wanted.
    """
    p, t = problem, problem.tiles
    splits = schedule.max_splits(p.max_tiles, t)
    out = [
        jax.ShapeDtypeStruct((p.pairs, splits, p.queries, p.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((p.pairs, splits, p.queries), jnp.float32),
        jax.ShapeDtypeStruct((p.padded_pairs,), jnp.int32),
    ]
    if p.logits:
        out.append(jax.ShapeDtypeStruct((p.pairs, p.max_tiles * t.tokens), jnp.float32))
    # tiles of 8 rows by one swizzle, of 128 or 64 bytes: elements have 2 bytes
    lane = 64 if p.head_dim % 64 == 0 and t.tokens % 64 == 0 else 32
    storage = (plgpu.TilingTransform((8, lane)), plgpu.SwizzleTransform(2 * lane))
    rings = (t.teams, t.stages, t.tokens, p.head_dim)
    ring, runs = (
        partial(plgpu.Barrier, num_barriers=t.teams * t.stages),
        plgpu.Barrier(num_barriers=t.teams * p.runs),
    )
    scratch = {
        # one window of M rows per run, `rows` apart: they overlap, and only their first `rows` rows
        # are read into results
        "q_s": plgpu.SMEM(
            (M + (t.teams * p.runs - 1) * p.rows, p.head_dim), p.dtype, transforms=storage
        ),
        "k_s": plgpu.SMEM(rings, p.dtype, transforms=storage),
        "v_s": plgpu.SMEM(rings, p.dtype, transforms=storage),
        # first head, tiles before it, first tile, end tile
        "share_s": plgpu.SMEM((t.teams, 4), jnp.int32),
        # head, first split, end split, tiles and splits of the head, extra tile, tiles sent before,
        # FIRST_ROW
        "run_s": plgpu.SMEM((t.teams * p.runs, 8), jnp.int32),
        # a tile's tokens that count, as bits: 8 pages of 8 tokens need the most words
        "words_s": plgpu.SMEM((t.teams * t.stages, 8), jnp.int32),
        # Barriers: the producer fills what the consumer frees; a *_full of a copy also counts its
        # bytes. Runs and tiles go round in rings, so a slot's nth use is its barrier's nth phase.
        "shared": plgpu.Barrier(),  # the first team has found all shares
        "q_full": runs,  # the run's queries are there
        "run_full": runs,  # run_s is written
        "run_free": runs,  # the run is done: its run_s and queries may be overwritten
        # one arrival per copy: K of each page, and its bias; words_s is written before
        "k_full": ring(num_arrivals=p.pages_a_tile * (1 + p.has_bias)),
        "v_full": ring(num_arrivals=p.pages_a_tile),
        "k_free": ring(),  # K, bias and words are used
        "v_free": ring(),  # V is used
    }
    if p.has_bias:  # each page's takes 128 bytes or more, since copies begin at multiples of that
        bias = (t.teams, t.stages, p.pages_a_tile, max(p.page_size, BIAS_ROW))
        scratch["bias_s"] = plgpu.SMEM(bias, jnp.float32)
    # q [windows, rows, H]; k, v [pages, P, H]; lengths, count [pairs]
    names = ["q", "k", "v", "lengths", "count"]
    optional = {
        "dense": p.has_dense,  # [pairs]
        "ids": p.capacity,  # [pairs, C]
        "bits": p.has_bits,  # [pairs, C]
        "table": p.has_table,  # [pairs, M]
        "bias": p.has_bias,  # [pages, P]
    }
    names += [name for name, there in optional.items() if there]
    names += ["o", "lse", "splits"] + ["logits"] * p.logits  # shaped as in `out`

    def body(*refs, **scratch):
        gmem = dict(zip(names, refs, strict=True))

        # two teams, each of 128 threads at 208 and 128 at 40, take 63,488 of 65,536 registers
        @pl.when(lax.axis_index("warpgroup") < t.teams)
        def _():
            plgpu.set_max_registers(208, action="increase")
            consume(p, gmem, scratch)

        @pl.when(lax.axis_index("warpgroup") >= t.teams)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            produce(p, gmem, scratch)

    body.__name__ = "block_sparse_decode"
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
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
    """Put the mean query's logits, which lie in the order of the tiles, where the pages are."""
    pages, size = layer.num_pages, layer.page_size
    scores = place_logits(
        logits, selection, layer.lengths, stats=stats, num_pages=pages, page_size=size
    )
    return Stats(scores, lse)
