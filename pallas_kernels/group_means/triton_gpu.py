"""Implements `api.group_means` with jax-triton, as products with a 0/1 membership matrix.

A program accumulates the sums of a block of groups over all points of the head, in their order. The
matrix is built in registers, and multiplying by it is exact: float32 points are the sum of three
bfloat16 parts, each multiplied separately.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32

from jsparse.shapes import Rows

BLOCK = 64  # groups per program
TILE_BYTES = 16384  # bytes of points per tile, which has at most 64 points
NUM_WARPS, NUM_STAGES = 8, 3


def group_means(
    points: Float[Array, "B K C H"],
    of_point: Int32[Array, "B K C"],
    number: Rows,
    groups: Rows,
    *,
    max_groups: int,
) -> tuple[Float32[Array, "B K L H"], Int32[Array, "B K L"]]:
    """Implements `api.group_means` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, heads, count, width = points.shape
    blocks = triton.cdiv(max_groups, BLOCK)
    channels = max(16, triton.next_power_of_2(width))
    return tuple(
        triton_call(
            points,
            of_point,
            number,
            groups,
            kernel=means_kernel,
            out_shape=[
                jax.ShapeDtypeStruct((batch, heads, max_groups, width), jnp.float32),
                jax.ShapeDtypeStruct((batch, heads, max_groups), jnp.int32),
            ],
            grid=(batch * heads * blocks,),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
            C=count,
            L=max_groups,
            H=width,
            HEADS=heads,
            BLOCKS=blocks,
            BLOCK=BLOCK,
            TILE=min(max(TILE_BYTES // (channels * points.dtype.itemsize), 16), 64),
            CHANNELS=channels,
            SPLIT=points.dtype == jnp.float32,
        )
    )


@triton.jit
def means_kernel(
    points_ptr,  # [pairs, C, H]
    of_point_ptr,  # [pairs, C]
    number_ptr,  # [rows]
    groups_ptr,  # [rows]
    means_ptr,  # [pairs, L, H]
    sizes_ptr,  # [pairs, L]
    C: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Averages the points of a block of groups."""
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    number = tl.minimum(tl.load(number_ptr + pair // HEADS), C)
    groups = tl.load(groups_ptr + pair // HEADS)
    nth = first + tl.arange(0, BLOCK)  # [BLOCK]
    channel = tl.arange(0, CHANNELS)
    sums = tl.zeros([BLOCK, CHANNELS], tl.float32)
    counts = tl.zeros([BLOCK, TILE], tl.int32)
    end = tl.where(first < groups, number, 0)
    for at in range(0, end, TILE):
        point = at + tl.arange(0, TILE)  # [TILE]
        group = tl.load(of_point_ptr + pair * C + point, mask=point < number, other=-1)
        x = tl.load(  # [TILE, CHANNELS]
            points_ptr + (pair * C + point)[:, None] * H + channel[None, :],
            mask=(point < number)[:, None] & (channel < H)[None, :],
            other=0.0,
        )
        inside = group[None, :] == nth[:, None]  # [BLOCK, TILE]
        ones = tl.where(inside, 1.0, 0.0)
        counts += inside.to(tl.int32)
        if SPLIT:
            high = x.to(tl.bfloat16)
            rest = x - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            ones = ones.to(tl.bfloat16)
            sums = tl.dot(ones, low, sums)
            sums = tl.dot(ones, middle, sums)
            sums = tl.dot(ones, high, sums)
        else:
            sums = tl.dot(ones.to(x.dtype), x, sums)
    size = tl.sum(counts, 1)
    mean = sums / tl.maximum(size, 1).to(tl.float32)[:, None]
    tl.store(
        means_ptr + (pair * L + nth)[:, None] * H + channel[None, :],
        mean,
        mask=(nth < L)[:, None] & (channel < H)[None, :],
    )
    tl.store(sizes_ptr + pair * L + nth, size, mask=nth < L)
