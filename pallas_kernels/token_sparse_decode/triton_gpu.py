"""Attends to listed tokens or pages with jax-triton; all heads' lists are one pool of work.

Rows are gathered one by one; rows of K only if the list has no logits. A page's tokens are
consecutive rows. The list of a head is cut into units whose length depends only on that list and on
the capacity of lists, so that a row's bits are the same in any batch. A fixed number of programs
divide the units of all heads, the long ones first; each finds its own by prefix sums over all
counts. A second, small launch merges the units of every head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jsparse.cache import Int8Pages, LayerCache, TieredPool, arrays_of
from jsparse.pallas_kernels.merge_splits.api import merge_splits
from jsparse.pallas_kernels.place_logits.api import place_logits
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products
from jsparse.pallas_kernels.token_sparse_decode.triton_kernel import attend_kernel
from jsparse.pallas_kernels.token_sparse_decode.triton_tiers import Pools
from jsparse.selection import Selection
from jsparse.selection.partials import (
    AttentionOut,
    ListedLogits,
    MeanStatsKind,
    Stats,
    StatsKind,
    softmax_partial,
)

MAX_SUMS = 64 * 128  # sums of V that fit in the registers of four warps
LONG = 2048  # minimum capacity of long lists
LONG_UNIT = 1024  # tokens


class TokenTiling(NamedTuple):
    """Division of the work; result bits depend on it, but not on `programs`.

    Attributes:
        block: entries of a list per load.
        unit_blocks: minimum blocks per unit.
        max_units: maximum units per head: longer lists have longer units.
        programs: programs per SM.
        num_warps, num_stages: warps per program, and its blocks in flight.
    """

    block: int
    unit_blocks: int = 2
    max_units: int = 64
    programs: int = 3
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class LaunchPlan:
    """Static parameters of one launch.

    Attributes:
        block, unit_blocks, max_units: as in TokenTiling.
        ring: pages in the ring of a head; 0 if all of K and V is in one memory.
        resident: whether heads may have all their pages on the device.
        int8: whether K and V are integers with scales.
        wide: whether products with V are in float32.
        has_reach: whether the channels of K have a reach.
        known: whether lists have logits.
        tokens: tokens per listed id: 1, or those of a page.
        has_bits: whether pages have token bits.
        has_dense, has_table, has_bias: whether there are dense heads, a block table, a bias.
        mean: the number of queries before the group's own: 1 for their mean, whose logits are
            reported, or 0.
        listed: whether every query's logits of listed tokens are reported.
        heads, group, head_dim, page_size: K, G, H and P.
        rows: queries, including the mean, rounded up to a power of two: at least 16, which an MMA
            takes, or 8 if it multiplies integers, of which each query has two.
        mma_rows: rows of the products with V, at least 16.
        cols: H, rounded up to a power of two.
        pairs: B · K, rounded up to a power of two.
        scale: the factor of products.
        precision: that of products.
    """

    block: int
    unit_blocks: int
    max_units: int
    ring: int
    resident: bool
    int8: bool
    wide: bool
    has_reach: bool
    known: bool
    tokens: int
    has_bits: bool
    has_dense: bool
    has_table: bool
    has_bias: bool
    mean: int
    listed: bool
    heads: int
    group: int
    head_dim: int
    page_size: int
    rows: int
    mma_rows: int
    cols: int
    pairs: int
    scale: float
    precision: str


def default_tiling(
    head_dim: int, itemsize: int, capacity: int = 0, *, listed: bool = False, rows: int = 16
) -> TokenTiling:
    """Chooses blocks of 16 KB of K.

    Two blocks of K and two of V in flight, in each of three programs, fill an SM; if logits are
    listed, registers fit only two programs. With long lists, four programs of two warps have half
    of that in flight each.
    """
    width = triton.next_power_of_2(head_dim)
    block = min(max(16384 // (width * itemsize), 16), 128)
    if rows * width > MAX_SUMS:
        return TokenTiling(block, programs=2 if listed else 3, num_warps=8)
    if listed and capacity >= LONG:
        return TokenTiling(max(block // 2, 16), unit_blocks=4, programs=4, num_warps=2)
    return TokenTiling(block, programs=2 if listed else 3)


def int8_tiling(head_dim: int, rows: int, longest: int, *, mixed: bool) -> TokenTiling:
    """Chooses blocks of 4 KB of K in 8 bits.

    It needs more arithmetic per byte, which eight programs of one warp overlap best: they wait for
    no other warp. The longest lists are cut into more units, so that those of one row occupy every
    SM; of shorter lists, such units would be too short. If only some heads are dense, theirs must
    occupy every SM and are cut into twice as many.

    Args:
        head_dim: H.
        rows: of products with V.
        longest: tokens of the longest list.
        mixed: whether heads may be dense beside others.
    """
    width = triton.next_power_of_2(head_dim)
    num_warps = triton.next_power_of_2(triton.cdiv(rows * width, MAX_SUMS // 4))
    num_warps = num_warps if num_warps < 4 else 8
    unit = LONG_UNIT // 2 if mixed else LONG_UNIT
    return TokenTiling(
        block=min(max(4096 // width, 32), 128),
        unit_blocks=4,
        max_units=min(max(longest // unit, 64), 256 if mixed else 128),
        programs=8 // num_warps,
        num_warps=num_warps,
    )


def sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float,
    stats: StatsKind | None,
    dtype: DTypeLike = jnp.float32,
    tiling: TokenTiling | None = None,
) -> AttentionOut:
    """Implements `token_sparse_decode` and `block_sparse_decode` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads), head_dim, capacity = layer.lengths.shape, q.shape[2], selection.ids.shape[2]
    pairs, group = batch * heads, q.shape[1] // heads
    listed = stats == "listed_logits"
    by_slot = stats is not None and not listed  # the logits of the mean query
    queries = group + by_slot
    int8 = isinstance(layer.k, Int8Pages)
    rows = max(8 if int8 else 16, triton.next_power_of_2(queries))
    tokens = 1 if selection.granularity == "token" else layer.page_size
    mixed = selection.dense is not None and capacity > 0
    longest = capacity * tokens + 1  # the newest token follows a list
    longest = longest if selection.dense is None else max(longest, layer.capacity)
    if tiling is None and int8:
        tiling = int8_tiling(head_dim, max(rows, 16), longest, mixed=mixed)
    elif tiling is None:
        tiling = default_tiling(head_dim, q.dtype.itemsize, capacity, listed=listed, rows=rows)
    splits = min(tiling.max_units, triton.cdiv(longest, tiling.block * tiling.unit_blocks))
    ring, pools = tiers(layer)
    plan = LaunchPlan(
        block=tiling.block,
        unit_blocks=tiling.unit_blocks,
        max_units=tiling.max_units,
        ring=ring,
        resident=pools.own_first is not None,
        int8=int8,
        wide=q.dtype == jnp.float32,
        has_reach=pools.reach is not None,
        # dense heads and the mean query read keys that have no known logits
        known=selection.logits is not None and selection.dense is None and not by_slot,
        tokens=tokens,
        has_bits=selection.bits is not None and capacity > 0,
        has_dense=selection.dense is not None,
        has_table=layer.block_table is not None,
        has_bias=layer.bias is not None,
        mean=int(by_slot),
        listed=listed,
        heads=heads,
        group=group,
        head_dim=head_dim,
        page_size=layer.page_size,
        rows=rows,
        mma_rows=max(16, rows),
        # the minimum of an MMA
        cols=max(32 if int8 else 16, triton.next_power_of_2(head_dim)),
        pairs=triton.next_power_of_2(pairs),
        scale=sm_scale,
        precision="ieee" if q.dtype == jnp.float32 else "tf32",
    )
    whole_row = jax.ShapeDtypeStruct((batch, heads, layer.capacity), jnp.float32)
    of_list = jax.ShapeDtypeStruct((batch, heads, group, capacity + 1), jnp.float32)
    nothing = jax.ShapeDtypeStruct((1,), jnp.int32)
    o, lse, used, scores, ids, count = triton_call(
        *_inputs(q, layer, selection, pools, plan),
        pairs,
        capacity,
        layer.num_pages,
        splits,
        kernel=attend_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((pairs, splits, queries, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((pairs, splits, queries), jnp.float32),
            jax.ShapeDtypeStruct((pairs,), jnp.int32),
            whole_row if by_slot else of_list if listed else nothing,
            jax.ShapeDtypeStruct((batch, heads, capacity + 1), jnp.int32) if listed else nothing,
            jax.ShapeDtypeStruct((batch, heads), jnp.int32) if listed else nothing,
        ],
        input_output_aliases={10: 3} if by_slot and tokens == 1 else {},
        grid=min(pairs * splits, tiling.programs * jax.local_devices()[0].core_count),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        plan=plan,
    )
    o, lse = merge_splits(
        o, lse, used, queries, lse_only=plan.mean, dtype=dtype, implementation="triton"
    )
    out = AttentionOut(o.reshape(q.shape), lse[:, -group:].reshape(q.shape[:2]))
    if stats is None:
        return out
    if stats == "listed_logits":
        lse = lse.reshape(batch, heads, group)
        if selection.dense is not None:  # they report nothing
            lse = jnp.where(count[..., None] > 0, lse, -jnp.inf)
        return out._replace(stats=ListedLogits(ids, count, scores, lse))
    scores = _placed(scores, layer, selection, stats)
    return out._replace(stats=Stats(scores, lse[:, 0].reshape(batch, heads)))


def _placed(
    scores: Float32[Array, "B K slots"],
    layer: LayerCache,
    selection: Selection,
    stats: MeanStatsKind,
) -> Float32[Array, "B K units"]:
    """Returns the scores of a report, from logits by slot; only read pages of lists are written."""
    pages, size = layer.num_pages, layer.page_size
    if selection.granularity == "page":
        return place_logits(
            scores.reshape(layer.lengths.size, -1),
            selection,
            layer.lengths,
            stats=stats,
            num_pages=pages,
            page_size=size,
            by_slot=True,
            implementation="triton",
        )
    if stats == "token_logits":
        return scores
    return softmax_partial(scores.reshape(*layer.lengths.shape, pages, size))[2]


def _inputs(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    pools: Pools,
    plan: LaunchPlan,
) -> tuple[Array, ...]:
    """Returns the arrays of a launch; lengths are an unread placeholder for missing arrays."""
    mean_logits = (*layer.lengths.shape, layer.capacity)
    arrays = (
        q,
        pools.k,
        pools.v,
        layer.lengths,
        selection.count,
        selection.dense,
        selection.ids if selection.ids.shape[2] else None,
        lax.bitcast_convert_type(selection.bits, jnp.int32)
        if plan.has_bits and selection.bits is not None
        else None,
        layer.block_table,
        layer.bias,
        jnp.full(mean_logits, -jnp.inf, jnp.float32) if plan.mean and plan.tokens == 1 else None,
        pools.ring_k,
        pools.ring_v,
        pools.own_k,
        pools.own_v,
        pools.own_first,
        with_newest(q, layer, selection, plan.scale) if plan.known else None,
        pools.k_scales,
        pools.v_scales,
        pools.ring_k_scales,
        pools.ring_v_scales,
        pools.own_k_scales,
        pools.own_v_scales,
        pools.reach,
    )
    return tuple(layer.lengths if array is None else array for array in arrays)


def tiers(layer: LayerCache) -> tuple[int, Pools]:
    """Returns the pages in the ring of a head, 0 without rings, and the pools of K and V."""
    ring, first, arrays = 0, None, {}
    for name, pool in (("k", layer.k), ("v", layer.v)):
        values, scales, _ = arrays_of(pool)
        for part, held in ((name, values), (f"{name}_scales", scales)):
            if not isinstance(held, TieredPool):
                arrays[part] = held
                continue
            arrays |= {part: held.host, f"ring_{part}": held.ring, f"own_{part}": held.resident}
            ring = held.ring_pages(layer)
            first = None if held.resident is None else held.resident_first(layer)
    return ring, Pools(**arrays, own_first=first, reach=arrays_of(layer.k).reach)


def with_newest(
    q: Float[Array, "B N H"], layer: LayerCache, selection: Selection, sm_scale: float
) -> Float32[Array, "B K G entries"]:
    """Returns the lists' logits, each followed by that of the newest token."""
    newest = jnp.clip(layer.lengths[..., None] - 1, 0)
    of_newest = sm_scale * products(
        q.reshape(*layer.lengths.shape, -1, q.shape[-1]), layer.k, layer, newest
    )
    assert selection.logits is not None
    logits = jnp.pad(selection.logits, ((0, 0), (0, 0), (0, 0), (0, 1)))
    nth = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    behind = nth == selection.count[..., None]
    return jnp.where(behind[:, :, None], of_newest, logits)
