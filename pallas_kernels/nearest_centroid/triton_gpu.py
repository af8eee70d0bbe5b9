"""Implements `api.nearest_centroid` with jax-triton; products never leave the registers.

A program has a block of points and loops over blocks of centroids. For each column of a block it
keeps the largest product so far and its index, so that rows are reduced only once, at the end. With
few points, programs divide a head's centroids, and a second launch reduces their results.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int32

from jsparse.shapes import Rows

FEW = 64  # maximum points of a short head
SPAN = 256  # centroids per program of a short head
NUM_STAGES = 3


def blocks_for(points: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Returns points per block, centroids per block, and the number of warps.

    The blocks fit in 99 KB of shared memory, which every GPU has per program.
    """
    if itemsize == 4:  # tensor cores do not multiply float32
        return 32, 32, 4
    if points > FEW:
        return 128 if width <= 128 else 64, 64, 8
    return max(triton.next_power_of_2(points), 16), 64, 4


def nearest_centroid(
    points: Float[Array, "B K C H"],
    centroid: Float[Array, "B K L H"],
    number: Rows,
    groups: Rows,
) -> Int32[Array, "B K C"]:
    """Implements `api.nearest_centroid` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads, count, width), max_groups = points.shape, centroid.shape[2]
    block, tile, warps = blocks_for(count, width, points.dtype.itemsize)
    blocks = triton.cdiv(count, block)
    splits = triton.cdiv(max_groups, SPAN) if count <= FEW else 1
    parts = (batch * heads, splits, count)
    best, nearest = triton_call(
        points,
        centroid,
        number,
        groups,
        kernel=nearest_kernel,
        out_shape=[
            jax.ShapeDtypeStruct(parts if splits > 1 else (1,), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.int32),
        ],
        grid=(batch * heads * blocks * splits,),
        num_warps=warps,
        num_stages=NUM_STAGES,
        C=count,
        L=max_groups,
        H=width,
        HEADS=heads,
        BLOCKS=blocks,
        SPLITS=splits,
        SPAN=SPAN if splits > 1 else max_groups,
        BLOCK=block,
        TILE=tile,
        CHANNELS=max(16, triton.next_power_of_2(width)),
    )
    if splits > 1:
        nearest = triton_call(
            best,
            nearest,
            kernel=reduce_kernel,
            out_shape=jax.ShapeDtypeStruct((batch * heads, count), jnp.int32),
            grid=(batch * heads,),
            num_warps=1,
            C=count,
            SPLITS=splits,
            BLOCK=max(triton.next_power_of_2(count), 32),
        )
    return nearest.reshape(batch, heads, count)


@triton.jit
def larger(value, nth, other, other_nth):
    """Returns the larger of two products and its index; of equal ones the first."""
    first = (value > other) | ((value == other) & (nth < other_nth))
    return tl.where(first, value, other), tl.where(first, nth, other_nth)


@triton.jit
def nearest_kernel(
    points_ptr,  # [pairs, C, H]
    centroid_ptr,  # [pairs, L, H]
    number_ptr,  # [rows]
    groups_ptr,  # [rows]
    best_ptr,  # [pairs, SPLITS, C] if SPLITS is above 1
    nearest_ptr,  # [pairs, SPLITS, C]
    C: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Finds the nearest of SPAN centroids to each point of a block."""
    program = tl.program_id(0)
    first = program // SPLITS % BLOCKS * BLOCK
    pair = (program // (SPLITS * BLOCKS)).to(tl.int64)
    split = program % SPLITS
    number = tl.load(number_ptr + pair // HEADS)
    groups = tl.minimum(tl.load(groups_ptr + pair // HEADS), L)
    point = first + tl.arange(0, BLOCK)  # [BLOCK]
    channel = tl.arange(0, CHANNELS)
    there = (point < number) & (point < C)
    x = tl.load(  # [BLOCK, CHANNELS]
        points_ptr + (pair * C + point)[:, None] * H + channel[None, :],
        mask=there[:, None] & (channel < H)[None, :],
        other=0.0,
    )
    best = tl.full([BLOCK, TILE], float("-inf"), tl.float32)
    block = tl.zeros([BLOCK, TILE], tl.int32)
    begin = split * SPAN
    end = tl.where(first < number, tl.minimum(groups, begin + SPAN), begin)
    for at in range(begin, end, TILE):
        nth = at + tl.arange(0, TILE)  # [TILE]
        centroid = tl.load(  # [CHANNELS, TILE]
            centroid_ptr + (pair * L + nth)[None, :] * H + channel[:, None],
            mask=(nth < groups)[None, :] & (channel < H)[:, None],
            other=0.0,
        )
        products = tl.dot(x, centroid, input_precision="ieee")  # [BLOCK, TILE]
        # of equal products the first counts
        better = (products > best) & (nth < groups)[None, :]
        best = tl.where(better, products, best)
        block = tl.where(better, at, block)
    best, nearest = tl.reduce((best, block + tl.arange(0, TILE)[None, :]), 1, larger)
    nearest = tl.where(there & (best > float("-inf")), nearest, 0)
    into = (pair * SPLITS + split) * C + point
    tl.store(nearest_ptr + into, nearest, mask=point < C)
    if SPLITS > 1:
        tl.store(best_ptr + into, best, mask=point < C)


@triton.jit
def reduce_kernel(
    best_ptr,  # [pairs, SPLITS, C]
    split_ptr,  # [pairs, SPLITS, C]
    nearest_ptr,  # [pairs, C]
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chooses the nearest of the centroids found by the splits of a head."""
    pair = tl.program_id(0).to(tl.int64)
    point = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    nearest = tl.zeros([BLOCK], tl.int32)
    for split in range(SPLITS):
        at = (pair * SPLITS + split) * C + point
        value = tl.load(best_ptr + at, mask=point < C, other=float("-inf"))
        found = tl.load(split_ptr + at, mask=point < C, other=0)
        nearest = tl.where(value > best, found, nearest)
        best = tl.maximum(best, value)
    tl.store(nearest_ptr + pair * C + point, nearest, mask=point < C)
