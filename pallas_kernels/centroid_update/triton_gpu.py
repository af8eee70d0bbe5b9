"""Implements `api.centroid_update` with jax-triton, one program per head.

A program has the joined group of each new point in registers. It reads all groups before it writes
any; points of one group write equal results.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from jsparse.pallas_kernels import point_groups
from jsparse.pallas_kernels.point_groups import Groups

NUMBERS_PER_WARP = 1024  # numbers of all groups' centroids per warp


def centroid_update(
    groups: Groups,
    points: Float32[Array, "B K n H"],
    radius: Float32[Array, "B K n"] | None,
    group: Int32[Array, "B K n"],
    nth: Int32[Array, "B n"],
    *,
    normalise: bool,
) -> Groups:
    """Implements `api.centroid_update` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, heads, count, width = points.shape
    block, channels = triton.next_power_of_2(count), max(16, triton.next_power_of_2(width))
    radii = groups.radius is not None
    none = jax.ShapeDtypeStruct((1,), jnp.float32)
    inputs = (
        *(points if x is None else x for x in groups),  # placeholders are never read
        points,
        points if radius is None else radius,
        group,
        nth,
    )
    centroid, size, of_point, grown = triton_call(
        *inputs,
        kernel=update_kernel,
        out_shape=[none if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in groups],
        input_output_aliases={i: i for i in range(3 + radii)},
        grid=(batch * heads,),
        num_warps=min(max(block * channels // NUMBERS_PER_WARP, 2), 16),
        N=count,
        L=groups.size.shape[2],
        C=groups.of_point.shape[2],
        H=width,
        HEADS=heads,
        BLOCK=block,
        CHANNELS=channels,
        NORMALISE=normalise,
        RADII=radii,
        OWN=radius is not None,
        ROUNDING=point_groups.ROUNDING,
    )
    return Groups(centroid, size, of_point, grown if radii else None)


@triton.jit
def _joining(group_ptr, nth_ptr, other, group):
    """Returns which of the groups one new point joins."""
    there = tl.load(nth_ptr + other) >= 0
    return (tl.load(group_ptr + other) == group) & there


@triton.jit
def unit_length(x):
    """Scales rows to length 1; zero rows stay zero."""
    scale = tl.max(tl.abs(x), 1)[:, None]
    x /= tl.where(scale > 0, scale, 1.0)
    norm = tl.sqrt(tl.sum(x * x, 1))[:, None]
    return x / tl.where(norm > 0, norm, 1.0)


@triton.jit
def update_kernel(
    _centroid,  # alias of centroid_ptr
    _size,  # alias of size_ptr
    _of_point,  # alias of of_point_ptr
    _radius,  # alias of radius_ptr with RADII
    points_ptr,  # [pairs, N, H]
    own_ptr,  # [pairs, N] with OWN
    group_ptr,  # [pairs, N]
    nth_ptr,  # [rows, N]
    centroid_ptr,  # [pairs, L, H]
    size_ptr,  # [pairs, L]
    of_point_ptr,  # [pairs, C]
    radius_ptr,  # [pairs, L] with RADII
    N: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    NORMALISE: tl.constexpr,
    RADII: tl.constexpr,
    OWN: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Moves the centroids of one head's groups that have new points."""
    pair = tl.program_id(0).to(tl.int64)
    group_ptr += pair * N
    points_ptr += pair * N * H
    nth_ptr += pair // HEADS * N
    new = tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    nth = tl.load(nth_ptr + new, mask=new < N, other=-1)  # [BLOCK]
    there = (nth >= 0) & (nth < C)
    group = tl.load(group_ptr + new, mask=there, other=0)
    into = pair * L + group
    cells = into[:, None] * H + channel[None, :]  # [BLOCK, CHANNELS]
    inside = there[:, None] & (channel < H)[None, :]
    had = tl.load(size_ptr + into, mask=there, other=0)
    old = tl.load(centroid_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK, CHANNELS], tl.float32)
    size = had
    for other in range(N):
        joins = _joining(group_ptr, nth_ptr, other, group)
        point = tl.load(points_ptr + other * H + channel, mask=channel < H, other=0.0)
        added += tl.where(joins[:, None], point[None, :], 0.0)
        size += joins.to(tl.int32)
    centroid = (had.to(tl.float32)[:, None] * old + added) / tl.maximum(size, 1).to(tl.float32)[
        :, None
    ]
    if NORMALISE:
        centroid = unit_length(centroid)
    rounded = centroid.to(centroid_ptr.dtype.element_ty)
    radius = tl.zeros([BLOCK], tl.float32)
    if RADII:
        centroid = rounded.to(tl.float32)
        radius += tl.load(radius_ptr + into, mask=there, other=0.0)
        radius += tl.sqrt(tl.sum((centroid - old) * (centroid - old), 1))
        radius = tl.where(had > 0, radius, 0.0)
        for other in range(N):
            joins = _joining(group_ptr, nth_ptr, other, group)
            point = tl.load(points_ptr + other * H + channel, mask=channel < H, other=0.0)
            apart = point[None, :] - centroid
            away = tl.sqrt(tl.sum(apart * apart, 1))
            away += ROUNDING * (away + tl.max(tl.abs(point), 0))
            if OWN:
                away += tl.load(own_ptr + pair * N + other)
            radius = tl.maximum(radius, tl.where(joins, away, 0.0))
    tl.debug_barrier()  # other warps read this warp's writes
    tl.store(centroid_ptr + cells, rounded, mask=inside)
    tl.store(size_ptr + into, size, mask=there)
    tl.store(of_point_ptr + pair * C + nth, group, mask=there)
    if RADII:
        tl.store(radius_ptr + into, radius * (1 + ROUNDING), mask=there)
