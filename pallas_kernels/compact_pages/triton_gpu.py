"""Moves rows with jax-triton, in place, in one launch for K and V.

Ids ascend, so the row for slot j is at slot j or later. A program processes its head from front to
back in chunks of rows. A chunk overwrites only rows that this or an earlier chunk has read, so it
is enough to read each chunk completely before writing it, and later chunks can be prefetched with
their ids and locations.

Chunks of one head depend on each other, so programs divide a head by columns: each moves a strip of
all the head's rows, independently of the others. Strips are at least two 32-byte sectors (the
memory's granularity) wide, so nothing is read twice. There is no lock, and no scratch pool, which
would double the traffic.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import triton
import triton.language as tl
from jaxtyping import Array

from jsparse.cache import LayerCache, arrays_of, with_arrays
from jsparse.shapes import Ids, Lengths


class CompactTiling(NamedTuple):
    """Division of the rows among programs.

    Attributes:
        strip: bytes of a row per program, a power of two.
        rows: rows per chunk. A program has one chunk in registers and the next in flight.
        num_warps: warps per program.
    """

    strip: int = 256  # 282 us; 64 bytes took 484 (bench/README.md)
    rows: int = 256
    num_warps: int = 8


@dataclass(frozen=True)
class Strips:
    """Static parameters of one launch, with the letters of jsparse.shapes.

    Attributes:
        capacity, pages, page_size: C, M and P.
        columns: elements per row.
        width: elements of a row per strip.
        rows: rows per chunk.
        paged: whether the layer has a block table.
    """

    capacity: int
    pages: int
    page_size: int
    columns: int
    width: int
    rows: int
    paged: bool


@triton.jit
def locate(
    table,  # [B, K, M]
    head,
    slot,
    valid,
    plan: tl.constexpr,
):
    """Returns each slot's row in the pool; int64, since a pool may have more than 2^31 elements."""
    page = head * plan.pages + slot // plan.page_size
    if plan.paged:
        page = tl.load(table + page, mask=valid, other=0).to(tl.int64)
    return page * plan.page_size + slot % plan.page_size


@triton.jit
def find(
    ids,  # [B, K, C]
    table,  # [B, K, M]
    head,
    slot,
    count,
    plan: tl.constexpr,
):
    """Returns the source rows for `slot`, and a mask of those that have to move."""
    listed = slot < count
    source = tl.load(ids + head * plan.capacity + slot, mask=listed, other=0)
    moves = listed & (source != slot)
    return locate(table, head, source, moves, plan), moves


@triton.jit
def elements(
    pool,  # [pages, P, columns]
    row,
    plan: tl.constexpr,
):
    """Returns pointers to this program's strip of each row."""
    column = tl.program_id(1) * plan.width + tl.arange(0, plan.width)
    return pool + row[:, None] * plan.columns + column[None, :]


@triton.jit
def move_strip(
    ids,  # [B, K, C]
    moved,  # [B, K]
    table,  # [B, K, M]
    pool,  # [pages, P, columns]
    plan: tl.constexpr,
):
    """Moves a strip of columns of one head."""
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(moved + head)
    slot = tl.arange(0, plan.rows)
    row, moves = find(ids, table, head, slot, count, plan)
    rows = tl.load(elements(pool, row, plan), mask=moves[:, None], other=0)
    row, moves_next = find(ids, table, head, slot + plan.rows, count, plan)
    # each pass stores a chunk; the next chunk's rows and the locations after it are in flight
    for _start in range(0, count, plan.rows):
        rows_next = tl.load(elements(pool, row, plan), mask=moves_next[:, None], other=0)
        row, moves_then = find(ids, table, head, slot + 2 * plan.rows, count, plan)
        goal = locate(table, head, slot, moves, plan)
        tl.debug_barrier()  # every thread has read its part of the chunk
        tl.store(elements(pool, goal, plan), rows, mask=moves[:, None])
        rows, moves, moves_next, slot = rows_next, moves_next, moves_then, slot + plan.rows


@triton.jit
def move_one(
    ids,  # [B, K, C]
    moved,  # [B, K]
    table,  # [B, K, M]
    _given,  # alias of pool
    pool,  # [pages, P, columns]
    plan: tl.constexpr,
):
    """Moves the rows of one pool; programs are (head, strip, 0)."""
    move_strip(ids, moved, table, pool, plan)


@triton.jit
def move_two(
    ids,  # [B, K, C]
    moved,  # [B, K]
    table,  # [B, K, M]
    _first_given,  # aliases of the pools
    _second_given,
    first,  # [pages, P, columns]
    second,  # [pages, P, columns]
    plan: tl.constexpr,
):
    """Moves the rows of two pools of one type; programs are (head, strip, pool)."""
    move_strip(ids, moved, table, first if tl.program_id(2) == 0 else second, plan)


def move_rows(
    layer: LayerCache, ids: Ids, moved: Lengths, *, tiling: CompactTiling | None = None
) -> LayerCache:
    """Implements `reference.move_rows` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    if ids.size == 0:
        return layer
    tiling = tiling or CompactTiling()
    table = layer.block_table

    def move(*pools: Array) -> list[Array]:
        columns = pools[0].shape[2] if pools[0].ndim == 3 else 1
        # the widest power of two that divides a row, up to the strip
        width = min(columns & -columns, tiling.strip // pools[0].dtype.itemsize)
        return triton_call(
            ids,
            moved,
            moved if table is None else table,  # placeholder, never read
            *pools,
            kernel=move_one if len(pools) == 1 else move_two,
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            input_output_aliases={3 + nth: nth for nth in range(len(pools))},
            grid=(moved.size, columns // width, len(pools)),
            num_warps=tiling.num_warps,
            num_stages=1,
            plan=Strips(
                capacity=ids.shape[-1],
                pages=layer.num_pages,
                page_size=layer.page_size,
                columns=columns,
                width=width,
                rows=tiling.rows,
                paged=table is not None,
            ),
        )

    bias, slot_positions = (
        pool if pool is None else move(pool)[0] for pool in (layer.bias, layer.slot_positions)
    )
    k, v = arrays_of(layer.k), arrays_of(layer.v)
    values = move(k.values, v.values)
    scales = (None, None) if k.scales is None else move(k.scales, v.scales)
    k, v = map(with_arrays, (layer.k, layer.v), values, scales)
    return layer._replace(k=k, v=v, bias=bias, slot_positions=slot_positions)
