"""Implements `api.page_bounds` with jax-triton, by two MMAs with pages as their rows.

Positive channels of the query meet the upper bounds, negative ones the lower. With a slack c below
1 the score is c times that, plus (1 - c)/2 times the query's product with both bounds, for which
the query is another column of the same MMAs, so that no operand is rounded. A page's score comes
from one row of one tile, so neither tiling nor batch size changes its bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.key_bounds import Bounds, PageBounds
from jsparse.pallas_kernels.mean_query_triton import load_queries


class BoundsTiling(NamedTuple):
    """Division of the work; results are bitwise independent of it.

    Attributes:
        block: pages per tile.
        max_tiles: maximum tiles per program.
        programs: programs per SM before any program gets more than one tile.
        num_warps: warps per program.
        ahead: tiles prefetched.
    """

    block: int
    max_tiles: int = 16
    programs: int = 4
    num_warps: int = 2
    ahead: int = 3


def default_tiling(head_dim: int, itemsize: int) -> BoundsTiling:
    """Chooses tiles of 8 KB of each bound.

    Three of them in flight, in each of four programs, fill an SM's shared memory. Larger tiles,
    which an MMA's 16 rows can need, have fewer in flight.
    """
    row = triton.next_power_of_2(head_dim) * itemsize
    block = min(max(8192 // row, 16), 64)
    return BoundsTiling(block, ahead=min(3, 24576 // (block * row)))


def page_bounds(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    bounds: PageBounds,
    *,
    slack: float,
    group: str,
    sm_scale: float,
    frame: None = None,
    tiling: BoundsTiling | None = None,
) -> Float32[Array, "B K M"]:
    """Implements `api.page_bounds` for bounds in K's dtype with jax-triton."""
    head_dim = q.shape[2]
    constants = {
        "SCALE": sm_scale,
        "H": head_dim,
        "CHANNELS": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "ieee" if q.dtype == jnp.float32 else "tf32",
    }
    return launch(
        bounds_kernel,
        q,
        bounds,
        layer,
        tiling or default_tiling(head_dim, q.dtype.itemsize),
        slack,
        group,
        constants,
    )


def launch(
    kernel: Any,
    q: Array,
    bounds: Bounds,
    layer: LayerCache,
    tiling: BoundsTiling,
    slack: float,
    group: str,
    constants: Mapping[str, Any],
    more: Sequence[Array] = (),
) -> Float32[Array, "B K M"]:
    """Launches a kernel over tiles of pages, with `constants` and the parameters set here.

    `more` are arrays that follow the block table.
    """
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads), pages = layer.lengths.shape, layer.num_pages
    tiles = triton.cdiv(pages, tiling.block)
    everywhere = tiling.programs * jax.local_devices()[0].core_count
    per_program = min(triton.cdiv(tiles * batch * heads, everywhere), tiling.max_tiles)
    members, table = q.shape[1] // heads, layer.block_table
    queries = 1 if group == "mean" else members
    columns = 1 if slack == 1 else 2
    return triton_call(
        q,
        *bounds,
        layer.lengths,
        layer.lengths if table is None else table,  # placeholder, never read
        *more,
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct((batch, heads, pages), jnp.float32),
        grid=(triton.cdiv(tiles, per_program), batch * heads),
        num_warps=tiling.num_warps,
        STAGES=1 + tiling.ahead * (1 + (table is not None)),  # dependent loads share the stages
        BLOCK=tiling.block,
        TILES=per_program,
        M=pages,
        P=layer.page_size,
        G=queries,
        MEAN=members // queries,
        SLACK=slack,
        EACH=columns,
        COLS=max(8, columns * triton.next_power_of_2(queries)),  # 8 is the minimum N of an MMA
        HAS_TABLE=table is not None,
        **constants,
    )


@triton.jit
def by_head(
    scores,
    SLACK: tl.constexpr,
    EACH: tl.constexpr,
    COLS: tl.constexpr,
):
    """Returns scores by query head [BLOCK, COLS / EACH] from scores by column.

    A head has its bound and, if EACH is 2, the product with both bounds in the next column.
    """
    if EACH == 2:
        part = tl.where(tl.arange(0, COLS) % 2 == 0, SLACK, (1 - SLACK) / 2)
        scores = tl.sum(tl.reshape(scores * part[None, :], [scores.shape[0], COLS // 2, 2]), 2)
    return scores


@triton.jit
def bounds_kernel(
    q_ptr,  # [B, N, H]
    low_ptr,  # [pages, H]
    high_ptr,  # [pages, H]
    lengths_ptr,  # [B, K]
    table_ptr,  # [B, K, M]
    out_ptr,  # [B, K, M]
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    MEAN: tl.constexpr,
    SLACK: tl.constexpr,
    EACH: tl.constexpr,
    COLS: tl.constexpr,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores TILES tiles of one KV head; tiles past the head's length are filled with -inf."""
    pair = tl.program_id(1)
    first = tl.program_id(0) * (BLOCK * TILES)
    last = tl.minimum(first + BLOCK * TILES, M)
    row, col, channel = tl.arange(0, BLOCK), tl.arange(0, COLS), tl.arange(0, CHANNELS)
    of, whole = col // EACH, (col % EACH == 1)[:, None]
    q_at = q_ptr + (pair * G + of)[:, None] * (MEAN * H) + channel[None, :]
    q = load_queries(q_at, (of < G)[:, None] & (channel < H)[None, :], H, MEAN)
    zeros = tl.zeros_like(q)
    positive = tl.trans(tl.where((q > 0) | whole, q, zeros))
    negative = tl.trans(tl.where((q < 0) | whole, q, zeros))
    used = tl.minimum(tl.cdiv(tl.load(lengths_ptr + pair), P), M)
    if not HAS_TABLE:
        low_ptr += pair.to(tl.int64) * (M * H)
        high_ptr += pair.to(tl.int64) * (M * H)
    out_ptr += pair.to(tl.int64) * M
    tiles = tl.maximum(tl.cdiv(tl.minimum(used, last) - first, BLOCK), 0)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        page = first + tile * BLOCK + row
        # past the last page, read it again: no mask needed
        near = tl.minimum(page, used - 1)
        if HAS_TABLE:
            near = tl.load(table_ptr + pair * M + near).to(tl.int64)
        at = near[:, None] * H + channel[None, :]
        if CHANNELS == H:
            high = tl.load(high_ptr + at)
            low = tl.load(low_ptr + at)
        else:
            high = tl.load(high_ptr + at, mask=(channel < H)[None, :], other=0.0)
            low = tl.load(low_ptr + at, mask=(channel < H)[None, :], other=0.0)
        scores = tl.dot(high, positive, input_precision=PRECISION)
        scores = tl.dot(low, negative, scores, input_precision=PRECISION)
        scores = by_head(scores, SLACK, EACH, COLS)
        head = tl.arange(0, COLS // EACH)[None, :]
        best = SCALE * tl.max(tl.where(head < G, scores, float("-inf")), 1)
        tl.store(out_ptr + page, tl.where(page < used, best, float("-inf")), mask=page < M)
    for tile in range(tiles, tl.cdiv(last - first, BLOCK)):
        page = first + tile * BLOCK + row
        tl.store(out_ptr + page, tl.full([BLOCK], float("-inf"), tl.float32), mask=page < M)
