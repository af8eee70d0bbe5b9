"""The moves as a jax-triton kernel, in place, one launch for K and V.

A row never moves up: ids ascend, so slot j receives a row that lies at j or behind. A program goes
through its head front to back, one chunk of rows after the other; what a chunk overwrites are rows
that this or an earlier chunk has read, so nothing is lost as long as a chunk is read whole before
any of it is written. That also lets the next chunk be fetched first, and its ids, and where these
rows lie, be known before that.

Chunks of one head wait for each other, so a head is shared among programs by columns instead: every
program moves a strip of all the head's rows and needs to know nothing of the others. Strips are at
least two 32-byte sectors wide, the memory's own grain, so nothing is read twice; and there is
neither a scratch pool, which would double the traffic, nor a lock.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import triton
import triton.language as tl
from jaxtyping import Array

from jsparse.cache import LayerCache
from jsparse.shapes import Ids, Lengths


class CompactTiling(NamedTuple):
    """How the rows are shared out.

    Attributes:
        strip: bytes of a row that a program moves, a power of two.
        rows: of a chunk. A program holds one in registers and has the next in flight.
        num_warps: of a program.
    """

    strip: int = 256
    rows: int = 256
    num_warps: int = 8


@dataclass(frozen=True)
class Strips:
    """What is static about a call; letters as in jsparse.shapes.

    Attributes:
        capacity, pages, page_size: C, M and P.
        columns: elements of a row.
        width: of a strip.
        rows: of a chunk.
        paged: there is a block table.
    """

    capacity: int
    pages: int
    page_size: int
    columns: int
    width: int
    rows: int
    paged: bool


@triton.jit
def locate(table, head, slot, valid, plan: tl.constexpr):
    """The row in the pool of each slot of a head, int64: a pool may have more than 2^31 elements."""
    page = head * plan.pages + slot // plan.page_size
    if plan.paged:
        page = tl.load(table + page, mask=valid, other=0).to(tl.int64)
    return page * plan.page_size + slot % plan.page_size


@triton.jit
def find(ids, table, head, slot, count, plan: tl.constexpr):
    """Where the rows lie that go to `slot`, and which of them are not there already."""
    listed = slot < count
    source = tl.load(ids + head * plan.capacity + slot, mask=listed, other=0)
    moves = listed & (source != slot)
    return locate(table, head, source, moves, plan), moves


@triton.jit
def elements(pool, row, plan: tl.constexpr):
    """The strip of each row."""
    column = tl.program_id(1) * plan.width + tl.arange(0, plan.width)
    return pool + row[:, None] * plan.columns + column[None, :]


@triton.jit
def move_strip(ids, moved, table, pool, plan: tl.constexpr):
    """Moves a strip of columns of one head."""
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(moved + head)
    slot = tl.arange(0, plan.rows)
    row, moves = find(ids, table, head, slot, count, plan)
    rows = tl.load(elements(pool, row, plan), mask=moves[:, None], other=0)
    row, moves_next = find(ids, table, head, slot + plan.rows, count, plan)
    for _start in range(0, count, plan.rows):
        rows_next = tl.load(elements(pool, row, plan), mask=moves_next[:, None], other=0)
        row, moves_then = find(ids, table, head, slot + 2 * plan.rows, count, plan)
        goal = locate(table, head, slot, moves, plan)
        tl.debug_barrier()  # every thread has read its part of the chunk
        tl.store(elements(pool, goal, plan), rows, mask=moves[:, None])
        rows, moves, moves_next, slot = rows_next, moves_next, moves_then, slot + plan.rows


@triton.jit
def move_one(ids, moved, table, _given, pool, plan: tl.constexpr):
    """One pool; that which is given and that which is made share their memory."""
    move_strip(ids, moved, table, pool, plan)


@triton.jit
def move_two(ids, moved, table, _first_given, _second_given, first, second, plan: tl.constexpr):
    """Two pools of one type, programs (head, strip, pool)."""
    move_strip(ids, moved, table, first if tl.program_id(2) == 0 else second, plan)


def move_rows(
    layer: LayerCache, ids: Ids, moved: Lengths, *, tiling: CompactTiling | None = None
) -> LayerCache:
    """See reference."""
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
            moved if table is None else table,  # not read under the identity
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

    k, v = move(layer.k, layer.v)
    bias, slot_positions = (
        pool if pool is None else move(pool)[0] for pool in (layer.bias, layer.slot_positions)
    )
    return layer._replace(k=k, v=v, bias=bias, slot_positions=slot_positions)
