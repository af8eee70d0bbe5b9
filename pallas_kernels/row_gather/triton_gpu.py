"""Implements `api.row_gather` with jax-triton.

The kernel reads the pool in place, so only the rows of a pool in host memory cross the bus. The bus
has a high latency, so throughput depends on the number of 16-byte loads in flight. Each program
therefore loads a tile of several rows at once, and there are many programs.
"""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int32, Shaped


class GatherTiling(NamedTuple):
    """How rows are divided among programs.

    Attributes:
        size: bytes of a program's tile.
        num_warps: warps per program.
        cache: Triton's cache modifier for the pool's loads; ".cg" bypasses the L1 cache, since no
            program reads a row again.
    """

    size: int
    num_warps: int = 4
    cache: str = ".cg"


def default_tiling(total: int) -> GatherTiling:
    """Chooses tiles of 16 KB, down to 2 KB if larger ones would leave SMs idle.

    `total` is the number of bytes to gather.
    """
    share = max(total // (2 * jax.local_devices()[0].core_count), 1)
    return GatherTiling(min(max(triton.next_power_of_2(share), 2048), 16384))


def row_gather(
    pool: Shaped[Array, "rows *W"],
    ids: Int32[Array, "*lists C"],
    count: Int32[Array, "*lists"] | None,
    *,
    row_axes: int = 1,
    tiling: GatherTiling | None = None,
) -> Shaped[Array, "*gathered"]:
    """Implements `api.row_gather` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    shape, width = (*ids.shape, *pool.shape[row_axes:]), prod(pool.shape[row_axes:])
    if ids.size * width == 0:
        return jnp.zeros(shape, pool.dtype)
    tiling = default_tiling(ids.size * width * pool.dtype.itemsize) if tiling is None else tiling
    elements = tiling.size // pool.dtype.itemsize
    cols = min(triton.next_power_of_2(width), elements)
    rows = elements // cols
    return triton_call(
        pool,
        ids,
        ids if count is None else count,  # placeholder for a missing count; never read
        ids.size,
        ids.shape[-1],
        prod(pool.shape[:row_axes]),
        kernel=gather_kernel,
        out_shape=jax.ShapeDtypeStruct(shape, pool.dtype),
        grid=(triton.cdiv(ids.size, rows), triton.cdiv(width, cols)),
        num_warps=tiling.num_warps,
        W=width,
        ROWS=rows,
        COLS=cols,
        HAS_COUNT=count is not None,
        CACHE=tiling.cache,
    )


@triton.jit
def gather_kernel(
    pool_ptr,  # [pool_rows, W]
    ids_ptr,  # [entries], lists of `capacity` one after the other
    count_ptr,  # [entries / capacity]
    entries,
    capacity,
    pool_rows,
    o_ptr,  # [entries, W]
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Gathers COLS elements of each of ROWS entries."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    exists = entry < entries
    wanted = exists
    if HAS_COUNT:
        wanted &= entry % capacity < tl.load(count_ptr + entry // capacity, mask=exists, other=0)
    row = tl.load(ids_ptr + entry, mask=wanted, other=-1)
    wanted &= row >= 0
    row = tl.minimum(tl.maximum(row, 0), pool_rows - 1).to(tl.int64)
    x = tl.load(
        pool_ptr + row[:, None] * W + col,
        mask=wanted[:, None] & (col < W),
        other=0,
        cache_modifier=CACHE,
    )
    tl.store(o_ptr + entry.to(tl.int64)[:, None] * W + col, x, mask=exists[:, None] & (col < W))
