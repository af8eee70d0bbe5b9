"""Implements `api.bounds_append` with jax-triton, in place and in one launch.

There is a program for each page that may have been touched. Slots behind a page's last token read
that token again: it changes neither minimum nor maximum, and needs no mask.
"""

from dataclasses import dataclass

import jax
import triton
import triton.language as tl

from jsparse.cache import LayerCache
from jsparse.pallas_kernels import key_bounds
from jsparse.pallas_kernels.key_bounds import Bounds, PageBounds, PageBounds8
from jsparse.shapes import Lengths, Rows

VALUES_A_THREAD = 64  # of a page: 16 tokens of 128 channels are then one warp's, with no barrier


@dataclass(frozen=True)
class AppendPlan:
    """Holds the static parameters of one launch, with the letters of jsparse.shapes.

    Attributes:
        heads, pages, page_size, head_dim: K, M, P and H.
        rows, columns: the least powers of two that are no less than P and H.
        paged: whether there is a block table.
        steps, coarsest, least, greatest: the constants of `key_bounds`.
    """

    heads: int
    pages: int
    page_size: int
    head_dim: int
    rows: int
    columns: int
    paged: bool
    steps: int = key_bounds.STEPS
    coarsest: float = key_bounds.COARSEST
    least: float = key_bounds.LEAST
    greatest: float = key_bounds.GREATEST


def bounds_append(
    bounds: Bounds, layer: LayerCache, valid: Rows, first: Lengths, *, touched: int
) -> Bounds:
    """Implement `api.bounds_append` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (_, page_size, head_dim), table = layer.k.shape, layer.block_table
    plan = AppendPlan(
        heads=layer.lengths.shape[1],
        pages=layer.num_pages,
        page_size=page_size,
        head_dim=head_dim,
        rows=triton.next_power_of_2(page_size),
        columns=triton.next_power_of_2(head_dim),
        paged=table is not None,
    )
    pools = triton_call(
        *(layer.k, valid, first, layer.lengths),
        layer.lengths if table is None else table,  # a stand-in, never read
        *bounds,
        kernel=KERNELS[type(bounds)],
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in bounds],
        input_output_aliases={5 + nth: nth for nth in range(len(bounds))},
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
    """Return the program's logical page, its number of tokens, and whether any was written."""
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
    """Return a page's index in the pool, int64: a pool may have more than 2^31 elements."""
    page = tl.program_id(1) * plan.pages + logical
    if plan.paged:
        page = tl.load(table + page)
    return page.to(tl.int64)


@triton.jit
def wider(low, high, other_low, other_high):
    """Combine a minimum and a maximum."""
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def extremes(
    k,  # [pages, P, H]
    page,
    held,
    plan: tl.constexpr,
):
    """Reduce a page's first `held` tokens to each channel's least and greatest value, float32."""
    slot = tl.minimum(tl.arange(0, plan.rows), tl.minimum(held, plan.page_size) - 1)
    channel = tl.arange(0, plan.columns)[None, :]
    at = page * (plan.page_size * plan.head_dim) + (slot[:, None] * plan.head_dim + channel)
    keys = tl.load(k + at, mask=channel < plan.head_dim, other=0.0).to(tl.float32)
    return tl.reduce((keys, keys), 0, wider)


@triton.jit
def round_down(x):
    """Round down to a number that bfloat16 has, as `key_bounds` does."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + ((bits >> 31) & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def append_values(
    k,  # [pages, P, H]
    valid,  # [B]
    first,  # [B, K]
    lengths,  # [B, K]
    table,  # [B, K, M]
    _low_given,  # the bounds given: they share their memory with the last two
    _high_given,
    low_ptr,  # [pages, H]
    high_ptr,  # [pages, H]
    plan: tl.constexpr,
):
    """Update PageBounds of one page."""
    logical, held, touched = find(valid, first, lengths, plan)
    if touched:
        page = locate(table, logical, plan)
        low, high = extremes(k, page, held, plan)
        channel = tl.arange(0, plan.columns)
        at = page * plan.head_dim + channel
        tl.store(low_ptr + at, low, mask=channel < plan.head_dim)
        tl.store(high_ptr + at, high, mask=channel < plan.head_dim)


@triton.jit
def append_codes(
    k,  # [pages, P, H]
    valid,  # [B]
    first,  # [B, K]
    lengths,  # [B, K]
    table,  # [B, K, M]
    _low_given,  # the bounds given: they share their memory with the last three
    _high_given,
    _affine_given,
    low_ptr,  # [pages, H]
    high_ptr,  # [pages, H]
    affine_ptr,  # [pages, 2]
    plan: tl.constexpr,
):
    """Update PageBounds8 of one page, by the steps of `PageBounds8.of`."""
    logical, held, touched = find(valid, first, lengths, plan)
    if touched:
        page = locate(table, logical, plan)
        low, high = extremes(k, page, held, plan)
        channel = tl.arange(0, plan.columns)
        inside = channel < plan.head_dim
        low = tl.clamp(low, -plan.greatest, plan.greatest) - plan.least
        high = tl.clamp(high, -plan.greatest, plan.greatest) + plan.least
        real_low, real_high = (
            tl.where(inside, low, float("inf")),
            tl.where(inside, high, float("-inf")),
        )
        least, greatest = tl.reduce((real_low, real_high), 0, wider)
        zero = round_down(least)
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
