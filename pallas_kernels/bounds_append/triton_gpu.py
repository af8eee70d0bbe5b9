"""Implements `api.bounds_append` with jax-triton, in place and in one launch.

There is one program per possibly touched page. Slots past a page's last token read that token
again, which changes no extreme and needs no mask.

In a frame, a product of the rotation may be fused with its sum, also in the reference, and the
division by key_scale is a product with a reciprocal. A bound may therefore be an ulp of float32
off, and halfway between two codes it may get either.
"""

from dataclasses import dataclass

import jax
import triton
import triton.language as tl

from jsparse.cache import LayerCache, TieredPool, arrays_of, key_constants
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels import key_bounds
from jsparse.pallas_kernels.key_bounds import Bounds, PageBounds, PageBounds8
from jsparse.shapes import Lengths, Rows

SPAN = tl.constexpr(key_constants.SPAN)
VALUES_A_THREAD = 64  # per page: 16 tokens of 128 channels fit in one warp, without a barrier


@dataclass(frozen=True)
class AppendPlan:
    """Static parameters of one launch, with the letters of jsparse.shapes.

    Attributes:
        heads, pages, page_size, head_dim: K, M, P and H.
        rows, columns: P and H, rounded up to powers of two.
        paged: whether the layer has a block table.
        framed: whether bounds are in a frame.
        int8: the type in which keys in 8 bits are read; "" if keys are not in 8 bits.
        has_reach: whether their channels have a reach.
        steps, coarsest, min_magnitude, max_magnitude: the constants of `key_bounds`.
    """

    heads: int
    pages: int
    page_size: int
    head_dim: int
    rows: int
    columns: int
    paged: bool
    framed: bool
    int8: str
    has_reach: bool
    ring: int
    steps: int = key_bounds.STEPS
    coarsest: float = key_bounds.COARSEST
    min_magnitude: float = key_bounds.MIN_MAGNITUDE
    max_magnitude: float = key_bounds.MAX_MAGNITUDE


def bounds_append(
    bounds: Bounds,
    layer: LayerCache,
    valid: Rows,
    first: Lengths,
    *,
    touched: int,
    frame: KeyFrame | None = None,
) -> Bounds:
    """Implements `api.bounds_append` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (_, page_size, head_dim), table = layer.k.shape, layer.block_table
    absent = layer.lengths  # placeholder for missing arrays; never read
    (k, scales, reach), ring = arrays_of(layer.k), 0
    # touched pages are new, and therefore on the device
    if isinstance(scales, TieredPool):
        scales = scales.ring
    if isinstance(k, TieredPool):
        k, ring = k.ring, k.ring_pages(layer)
    plan = AppendPlan(
        heads=layer.lengths.shape[1],
        pages=layer.num_pages,
        page_size=page_size,
        head_dim=head_dim,
        rows=triton.next_power_of_2(page_size),
        columns=triton.next_power_of_2(head_dim),
        paged=table is not None,
        ring=ring,
        framed=frame is not None,
        int8="" if scales is None else layer.k.dtype.name,
        has_reach=reach is not None,
    )
    given = (
        *(k, valid, first, layer.lengths),
        absent if table is None else table,
        *((absent,) * 3 if frame is None else frame),
        *(absent if array is None else array for array in (scales, reach)),
    )
    pools = triton_call(
        *given,
        *bounds,
        kernel=KERNELS[type(bounds)],
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in bounds],
        input_output_aliases={len(given) + nth: nth for nth in range(len(bounds))},
        grid=(touched, layer.lengths.size),
        num_warps=min(max(plan.rows * plan.columns // (32 * VALUES_A_THREAD), 1), 4),
        num_stages=1,
        plan=plan,
    )
    return type(bounds)(*pools)


@triton.jit
def find(
    valid,  # [B]
    first,  # [B, K]
    lengths,  # [B, K]
    plan: tl.constexpr,
):
    """Returns the program's logical page, its number of tokens, and whether it was written to."""
    pair = tl.program_id(1)
    start = tl.load(first + pair)
    count = tl.load(valid + pair // plan.heads)
    length = tl.load(lengths + pair)
    page = start // plan.page_size + tl.program_id(0)
    slot = page * plan.page_size
    touched = (
        (count > 0) & (page >= 0) & (page < plan.pages) & (slot < tl.minimum(start + count, length))
    )
    return page, length - slot, touched


@triton.jit
def locate(
    table,  # [B, K, M]
    logical,
    plan: tl.constexpr,
):
    """Returns a page's index in the pool; int64, since a pool may have more than 2^31 elements."""
    page = tl.program_id(1) * plan.pages + logical
    if plan.paged:
        page = tl.load(table + page)
    return page.to(tl.int64)


@triton.jit
def locate_keys(
    page,
    logical,
    plan: tl.constexpr,
):
    """Returns the index of a page of keys, which may be in the head's ring of newest pages."""
    if plan.ring:
        page = (tl.program_id(1) * plan.ring + logical % plan.ring).to(tl.int64)
    return page


@triton.jit
def wider(low, high, other_low, other_high):
    """Combines minima and maxima."""
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def extremes(
    k,  # [pages, P, H]
    scales,  # [pages, P], if keys are in 8 bits
    reach,  # [K, H]
    page,
    held,
    plan: tl.constexpr,
):
    """Reduces a page's first `held` tokens to each channel's minimum and maximum, float32."""
    slot = tl.minimum(tl.arange(0, plan.rows), tl.minimum(held, plan.page_size) - 1)
    channel = tl.arange(0, plan.columns)[None, :]
    at = page * (plan.page_size * plan.head_dim) + (slot[:, None] * plan.head_dim + channel)
    keys = tl.load(k + at, mask=channel < plan.head_dim, other=0).to(tl.float32)
    if plan.int8 != "":
        keys *= tl.load(scales + page * plan.page_size + slot).to(tl.float32)[:, None]
        if plan.has_reach:
            head = tl.program_id(1) % plan.heads
            own = reach + head * plan.head_dim + channel
            keys *= tl.load(own, mask=channel < plan.head_dim, other=0.0)
        if plan.int8 == "bfloat16":
            keys = keys.to(tl.bfloat16).to(tl.float32)
        elif plan.int8 == "float16":
            keys = keys.to(tl.float16).to(tl.float32)
    return tl.reduce((keys, keys), 0, wider)


@triton.jit
def round_down(x):
    """Rounds down to a bfloat16 number, as `key_bounds` does."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + ((bits >> 31) & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def into_frame(
    low,
    high,
    mid,  # [K, H]
    key_scale,  # [K, H / 2]
    angles,  # [spans, H]
    logical,
    plan: tl.constexpr,
):
    """Returns a page's bounds in the frame, as key_constants.into_frame does."""
    channel, half = tl.arange(0, plan.columns), plan.head_dim // 2
    inside = channel < plan.head_dim
    head = tl.program_id(1) % plan.heads
    pair = tl.where(channel < half, channel, channel - half)
    partner = tl.where(channel < half, channel + half, pair)
    own = tl.load(mid + head * plan.head_dim + channel, mask=inside, other=0.0)
    others = tl.load(mid + head * plan.head_dim + partner, mask=inside, other=0.0)
    reach = tl.load(key_scale + head * half + pair, mask=inside, other=1.0)
    span = logical * plan.page_size // SPAN
    cos = tl.load(angles + span * plan.head_dim + pair, mask=inside, other=0.0)
    sin = tl.load(angles + span * plan.head_dim + pair + half, mask=inside, other=0.0)
    turned = own * cos + tl.where(channel < half, -others, others) * sin
    inverse = tl.div_rn(1.0, reach)
    return (low - turned) * inverse, (high - turned) * inverse


@triton.jit
def append_values(
    k,  # [pages, P, H], or rings of the newest pages
    valid,  # [B]
    first,  # [B, K]
    lengths,  # [B, K]
    table,  # [B, K, M]
    _mid,
    _key_scale,
    _angles,
    scales,  # [pages, P], if keys are in 8 bits
    reach,  # [K, H]
    _low_given,  # aliases of the last two
    _high_given,
    low_ptr,  # [pages, H]
    high_ptr,  # [pages, H]
    plan: tl.constexpr,
):
    """Updates PageBounds of one page."""
    logical, held, touched = find(valid, first, lengths, plan)
    if touched:
        page = locate(table, logical, plan)
        low, high = extremes(k, scales, reach, locate_keys(page, logical, plan), held, plan)
        channel = tl.arange(0, plan.columns)
        at = page * plan.head_dim + channel
        tl.store(low_ptr + at, low, mask=channel < plan.head_dim)
        tl.store(high_ptr + at, high, mask=channel < plan.head_dim)


@triton.jit
def append_codes(
    k,  # [pages, P, H], or rings of the newest pages
    valid,  # [B]
    first,  # [B, K]
    lengths,  # [B, K]
    table,  # [B, K, M]
    mid,  # [K, H]
    key_scale,  # [K, H / 2]
    angles,  # [spans, H]
    scales,  # [pages, P], if keys are in 8 bits
    reach,  # [K, H]
    _low_given,  # aliases of the last three
    _high_given,
    _affine_given,
    low_ptr,  # [pages, H]
    high_ptr,  # [pages, H]
    affine_ptr,  # [pages, 2]
    plan: tl.constexpr,
):
    """Updates PageBounds8 of one page, with the steps of `PageBounds8.of`."""
    logical, held, touched = find(valid, first, lengths, plan)
    if touched:
        page = locate(table, logical, plan)
        low, high = extremes(k, scales, reach, locate_keys(page, logical, plan), held, plan)
        if plan.framed:
            low, high = into_frame(low, high, mid, key_scale, angles, logical, plan)
        channel = tl.arange(0, plan.columns)
        inside = channel < plan.head_dim
        low = tl.clamp(low, -plan.max_magnitude, plan.max_magnitude) - plan.min_magnitude
        high = tl.clamp(high, -plan.max_magnitude, plan.max_magnitude) + plan.min_magnitude
        real_low, real_high = (
            tl.where(inside, low, float("inf")),
            tl.where(inside, high, float("-inf")),
        )
        lowest, greatest = tl.reduce((real_low, real_high), 0, wider)
        zero = round_down(lowest)
        scale = -round_down(
            -tl.maximum((greatest - zero) * (1 / plan.steps), tl.abs(zero) * plan.coarsest)
        )
        low_code = tl.floor((low - zero) * (1 / scale) + 0.5)
        high_code = tl.floor((high - zero) * (1 / scale) + 0.5)
        low_code -= (scale * low_code + zero > low).to(tl.float32)
        high_code += (scale * high_code + zero < high).to(tl.float32)
        at = page * plan.head_dim + channel
        tl.store(low_ptr + at, low_code.to(tl.uint8), mask=inside)
        tl.store(high_ptr + at, high_code.to(tl.uint8), mask=inside)
        tl.store(affine_ptr + 2 * page, scale)
        tl.store(affine_ptr + 2 * page + 1, zero)


KERNELS = {PageBounds: append_values, PageBounds8: append_codes}
