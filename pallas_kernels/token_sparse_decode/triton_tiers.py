"""Describes K and V in memory, and finds rows that are in several memories."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pools(NamedTuple):
    """K and V; None for missing arrays."""

    k: Any  # [pool pages, P, H], in host memory if there are rings
    v: Any  # [pool pages, P, H]
    ring_k: Any = None  # [pairs · ring, P, H]
    ring_v: Any = None  # [pairs · ring, P, H]
    own_k: Any = None  # [resident pages, P, H]
    own_v: Any = None  # [resident pages, P, H]
    own_first: Any = None  # [B, K], a resident head's first page; -1 for the others
    k_scales: Any = None  # [pool pages, P], if K and V are in 8 bits, like the next five
    v_scales: Any = None  # [pool pages, P]
    ring_k_scales: Any = None  # [pairs · ring, P]
    ring_v_scales: Any = None  # [pairs · ring, P]
    own_k_scales: Any = None  # [resident pages, P]
    own_v_scales: Any = None  # [resident pages, P]
    reach: Any = None  # [K, H], of the channels of K


@triton.jit
def first_own_page(pools, pair):
    """Returns a head's first resident page, or -1."""
    first = tl.full([], -1, tl.int32)
    if pools.own_first is not None:
        first = tl.load(pools.own_first + pair)
    return first


@triton.jit
def place(base, ring_ptr, own_ptr, W: tl.constexpr, head, own_first, slot, at, plan: tl.constexpr):
    """Returns the elements at which rows of W elements start, counted from `base`.

    The newest pages of a head are read from its ring, all pages of a resident head from the device,
    and other pages from `base`.
    """
    P: tl.constexpr = plan.page_size
    start = at * W
    if ring_ptr is not None:
        page = slot // P
        ring = (head.pair.to(tl.int64) * plan.ring + page % plan.ring) * P + slot % P
        here = page > head.newest // P - plan.ring
        start = tl.where(here, away(base, ring_ptr) + ring * W, start)
    if own_ptr is not None:
        own = own_first.to(tl.int64) * P + slot
        start = tl.where(own_first >= 0, away(base, own_ptr) + own * W, start)
    return start


@triton.jit
def away(base_ptr, ptr):
    """Returns the number of elements between two arrays, a multiple of 16 bytes.

    Loads then stay as wide as within one array, and one load serves every memory.
    """
    unit: tl.constexpr = 128 // base_ptr.dtype.element_ty.primitive_bitwidth
    return (ptr.to(tl.int64) - base_ptr.to(tl.int64)) // 16 * unit
