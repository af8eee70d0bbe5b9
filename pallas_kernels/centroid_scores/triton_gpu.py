"""Implements `api.centroid_scores` with jax-triton, one program per block of a head's centroids.

With units, a program first finds its centroids of chosen units and masks the loads of all other
rows. A row of 64 channels has at least 128 bytes, so scattered rows are read as fast as adjacent
ones, and units need no lists of centroids.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.shapes import Lengths, Queries

BLOCK_BYTES = 16384  # per block of centroids
NUM_WARPS = 4
MIN_BLOCK = 16  # minimum rows and columns of a product


def centroid_scores(
    q: Queries,
    centroids: Float[Array, "B K L H"],
    number: Lengths,
    radius: Float32[Array, "B K L"] | None,
    unit: Int32[Array, "B K L"] | None,
    chosen: Bool[Array, "B K U"] | None,
) -> Float32[Array, "B K L"]:
    """Implements `api.centroid_scores` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, heads, clusters, width = centroids.shape
    padded = max(triton.next_power_of_2(width), MIN_BLOCK)
    block = max(BLOCK_BYTES // (padded * centroids.dtype.itemsize), MIN_BLOCK)
    block = min(block, max(triton.next_power_of_2(clusters), MIN_BLOCK))
    blocks = triton.cdiv(clusters, block)
    group = q.shape[1] // heads
    inputs = (
        q,
        centroids,
        number,
        # placeholders for missing arrays; never read
        centroids if radius is None else radius,
        number if unit is None else unit,
        number if chosen is None else chosen.astype(jnp.int32),
    )
    return triton_call(
        *inputs,
        kernel=score_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, heads, clusters), jnp.float32),
        grid=(batch * heads * blocks,),
        num_warps=NUM_WARPS,
        BLOCKS=blocks,
        L=clusters,
        H=width,
        G=group,
        BLOCK=block,
        WIDTH=padded,
        GROUP=max(triton.next_power_of_2(group), MIN_BLOCK),
        SAME=q.dtype == centroids.dtype,
        RADII=radius is not None,
        UNITS=0 if chosen is None else chosen.shape[2],
    )


@triton.jit
def score_kernel(
    q_ptr,  # [pairs, G, H]
    centroids_ptr,  # [pairs, L, H]
    number_ptr,  # [pairs]
    radius_ptr,  # [pairs, L], read where RADII
    unit_ptr,  # [pairs, L], read where UNITS
    chosen_ptr,  # [pairs, UNITS], read where UNITS
    scores_ptr,  # [pairs, L]
    BLOCKS: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SAME: tl.constexpr,
    RADII: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Scores one block of a head's centroids."""
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    cluster = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    number = tl.minimum(tl.load(number_ptr + pair), L)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    there = cluster < number
    some = tl.program_id(0) % BLOCKS * BLOCK < number
    if UNITS:
        unit = tl.load(unit_ptr + pair * L + cluster, mask=there, other=0)
        there &= tl.load(chosen_ptr + pair * UNITS + unit, mask=there, other=0) != 0
        some = tl.max(there.to(tl.int32), 0) > 0
    if some:
        channel, head = tl.arange(0, WIDTH), tl.arange(0, GROUP)
        q = tl.load(  # [WIDTH, GROUP]
            q_ptr + pair * (G * H) + head[None, :] * H + channel[:, None],
            mask=(channel[:, None] < H) & (head[None, :] < G),
            other=0.0,
        )
        centroids = tl.load(  # [BLOCK, WIDTH]
            centroids_ptr + (pair * L + cluster[:, None]) * H + channel[None, :],
            mask=there[:, None] & (channel[None, :] < H),
            other=0.0,
        )
        if not SAME:
            q, centroids = q.to(tl.float32), centroids.to(tl.float32)
        products = tl.dot(centroids, q, input_precision="ieee")  # [BLOCK, GROUP]
        if RADII:
            long = q.to(tl.float32)
            length = tl.sqrt_rn(tl.sum(long * long, 0))
            radius = tl.load(radius_ptr + pair * L + cluster, mask=there, other=0.0)
            products += radius[:, None] * length[None, :]
        best = tl.max(tl.where(head[None, :] < G, products, float("-inf")), 1)
        best = tl.where(there, best, float("-inf"))
    tl.store(scores_ptr + pair * L + cluster, best, mask=cluster < L)
