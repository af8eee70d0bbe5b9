# pyright: reportAbstractUsage=false
"""The warpgroups' memory: a launch's arrays and a block's shared memory."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jsparse.pallas_kernels.block_sparse_decode.problem import BIAS_ROW, LANE, WARPS, Problem
from jsparse.pallas_kernels.block_sparse_decode.schedule import TOKENS


class GlobalRefs(NamedTuple):
    """Refs in global memory; None for arrays that the launch lacks."""

    q: Any  # [windows, rows, H]
    k: Any  # [pages, P, H]
    v: Any  # [pages, P, H]
    lengths: Any  # [pairs]
    count: Any  # [pairs]
    dense: Any  # [pairs]
    ids: Any  # [pairs, C]
    bits: Any  # [pairs, C]
    table: Any  # [pairs, M]
    bias: Any  # [pages, P]
    o: Any  # [pairs, splits, queries, H]
    lse: Any  # [pairs, splits, queries]
    splits: Any  # [padded pairs]
    logits: Any  # [pairs, slots]

    @classmethod
    def of(cls, p: Problem, refs: tuple[Any, ...]) -> "GlobalRefs":
        """Names the launch's refs, which are in the order of the fields."""
        optional = {
            "dense": p.has_dense,
            "ids": p.capacity,
            "bits": p.has_bits,
            "table": p.has_table,
            "bias": p.has_bias,
            "logits": p.logits,
        }
        there = (name for name in cls._fields if optional.get(name, True))
        return cls(**dict.fromkeys(cls._fields) | dict(zip(there, refs, strict=True)))


class SharedRefs(NamedTuple):
    """Shared memory and barriers of a block.

    The producer fills slots and the consumer frees them. A barrier for a copy (*_full) also counts
    bytes. Runs and tiles use ring buffers, so a slot's nth use is its barrier's nth phase.
    """

    q_s: Any  # [teams · runs, columns, H]
    k_s: Any  # [teams, stages, tokens, H]
    v_s: Any  # like k_s
    weights_s: Any  # [teams, columns, tokens]: weights of the current tile
    # [teams, 2, warps, columns]: each warp's maxima, then its sums
    reduced_s: Any
    sums_s: Any  # [2, teams, warps]: each warp's part of a sum; double-buffered
    share_s: Any  # [teams, 4]: first head, tiles before it, first tile, end tile
    # [teams · runs, 8]: head, first split, end split, tiles and splits of the head, extra tile,
    # tiles sent before, FIRST_ROW
    run_s: Any
    # [teams · stages, 8]: bits of a tile's attended tokens; 8 pages of 8 tokens need all 8 words
    words_s: Any
    shared: Any  # the first team has found all shares
    q_full: Any  # the run's queries have arrived
    run_full: Any  # run_s has been written
    run_free: Any  # the run has finished: its run_s and queries may be overwritten
    k_full: Any  # a tile's K and bias have arrived, and its words have been written
    v_full: Any  # a tile's V has arrived
    k_free: Any  # K, bias and words have been read
    v_free: Any  # V has been read
    bias_s: Any = None  # [teams, stages, pages per tile, ≥ P], if the layer has a bias


def storage() -> tuple[Any, ...]:
    """Returns the shared memory layout of wgmma operands.

    Tiles have 8 rows by one swizzle of 128 bytes; elements have 2 bytes.
    """
    return plgpu.TilingTransform((8, LANE)), plgpu.SwizzleTransform(2 * LANE)


def shared_types(p: Problem) -> dict[str, Any]:
    """Returns the types of the fields of `SharedRefs`, by name."""
    t = p.tiles
    tile = plgpu.SMEM((t.teams, t.stages, TOKENS, p.head_dim), p.dtype, transforms=storage())
    ring = partial(plgpu.Barrier, num_barriers=t.teams * t.stages)
    runs = plgpu.Barrier(num_barriers=t.teams * p.runs)
    types = {
        "q_s": plgpu.SMEM((t.teams * p.runs, p.columns, p.head_dim), p.dtype, transforms=storage()),
        "k_s": tile,
        "v_s": tile,
        "weights_s": plgpu.SMEM((t.teams, p.columns, TOKENS), p.dtype, transforms=storage()),
        "reduced_s": plgpu.SMEM((t.teams, 2, WARPS, p.columns), jnp.float32),
        "sums_s": plgpu.SMEM((2, t.teams, WARPS), jnp.int32),
        "share_s": plgpu.SMEM((t.teams, 4), jnp.int32),
        "run_s": plgpu.SMEM((t.teams * p.runs, 8), jnp.int32),
        "words_s": plgpu.SMEM((t.teams * t.stages, 8), jnp.int32),
        "shared": plgpu.Barrier(),
        "q_full": runs,
        "run_full": runs,
        "run_free": runs,
        # one arrival per copy: K of each page, and its bias
        "k_full": ring(num_arrivals=p.pages_a_tile * (1 + p.has_bias)),
        "v_full": ring(num_arrivals=p.pages_a_tile),
        "k_free": ring(),
        "v_free": ring(),
    }
    if p.has_bias:  # at least 128 bytes per page, since copies start at multiples of 128 bytes
        bias = (t.teams, t.stages, p.pages_a_tile, max(p.page_size, BIAS_ROW))
        types["bias_s"] = plgpu.SMEM(bias, jnp.float32)
    return types
