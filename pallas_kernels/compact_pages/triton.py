"""The moves as a jax-triton kernel, in place, one launch a pool.

A row never moves up: ids ascend, so slot j receives a row that lies at j or behind. A program goes through its head
front to back, one chunk of rows after the other; what a chunk overwrites are rows that this or an earlier chunk has
read, so nothing is lost as long as a chunk is read whole before any of it is written. That also lets the next chunk
be fetched first.

Chunks of one head wait for each other, so a head is shared among programs by columns instead: every program moves a
strip of all the head's rows and needs to know nothing of the others. Strips are two 32-byte sectors wide, the memory's
own grain, so nothing is read twice; and there is neither a scratch pool, which would double the traffic, nor a lock.
"""

# Where triton is not installed, pyright takes this very file for it.
# pyright: reportAttributeAccessIssue=false

import jax
import triton
import triton.language as tl
from jaxtyping import Array

from jsparse.cache import LayerCache
from jsparse.shapes import Ids, Lengths

STRIP_BYTES = 64
CHUNK_ROWS = 512  # a program holds one chunk in registers, 32 KiB of K or V, and has the next in flight
NUM_WARPS = 8


@triton.jit
def locate(table_ptr, head, slot, valid, M: tl.constexpr, P: tl.constexpr, TABLE: tl.constexpr):
    """The row in the pool of each slot of a head, int64: a pool may have more than 2^31 elements."""
    page = slot // P
    page = tl.load(table_ptr + head * M + page, mask=valid, other=0).to(tl.int64) if TABLE else head * M + page
    return page * P + slot % P


@triton.jit
def fetch(
    ids_ptr,
    table_ptr,
    pool_ptr,
    head,
    slot,
    count,
    column,
    C: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The rows that go to `slot`, and which of them are not there already."""
    listed = slot < count
    source = tl.load(ids_ptr + head * C + slot, mask=listed, other=0)
    moves = listed & (source != slot)
    row = locate(table_ptr, head, source, moves, M, P, TABLE)
    return tl.load(pool_ptr + row[:, None] * H + column[None, :], mask=moves[:, None], other=0), moves


@triton.jit
def move_strip(
    ids_ptr,
    moved_ptr,
    table_ptr,
    pool_in_ptr,
    pool_ptr,
    C: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Moves a strip of columns of one head. Both pool pointers are the same: input and output share their memory."""
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    count = tl.load(moved_ptr + head)
    slot = tl.arange(0, ROWS)
    rows, moves = fetch(ids_ptr, table_ptr, pool_ptr, head, slot, count, column, C, M, P, H, TABLE)
    for _start in range(0, count, ROWS):
        ahead, ahead_moves = fetch(ids_ptr, table_ptr, pool_ptr, head, slot + ROWS, count, column, C, M, P, H, TABLE)
        tl.debug_barrier()  # every thread has read its part of the chunk
        row = locate(table_ptr, head, slot, moves, M, P, TABLE)
        tl.store(pool_ptr + row[:, None] * H + column[None, :], rows, mask=moves[:, None])
        rows, moves, slot = ahead, ahead_moves, slot + ROWS


def move_rows(layer: LayerCache, ids: Ids, moved: Lengths) -> LayerCache:
    """See reference."""
    import jax_triton

    if ids.size == 0:
        return layer
    table = layer.block_table

    def move(pool: Array) -> Array:
        columns = pool.shape[2] if pool.ndim == 3 else 1
        # the widest power of two that divides a row, up to the strip
        width = min(columns & -columns, STRIP_BYTES // pool.dtype.itemsize)
        return jax_triton.triton_call(
            ids,
            moved,
            moved if table is None else table,  # not read under the identity
            pool,
            kernel=move_strip,
            out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            input_output_aliases={3: 0},
            grid=(moved.size, columns // width),
            num_warps=NUM_WARPS,
            num_stages=1,
            C=ids.shape[-1],
            M=layer.num_pages,
            P=layer.page_size,
            H=columns,
            WIDTH=width,
            ROWS=CHUNK_ROWS,
            TABLE=table is not None,
        )

    return layer._replace(
        k=move(layer.k),
        v=move(layer.v),
        bias=None if layer.bias is None else move(layer.bias),
        slot_positions=None if layer.slot_positions is None else move(layer.slot_positions),
    )
