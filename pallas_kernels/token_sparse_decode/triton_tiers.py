"""Describes K and V in memory, and finds rows that are in several memories."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pools(NamedTuple):
    """K and V; None for missing tiers."""

    k: Any  # [pool pages, P, H], in host memory if there are rings
    v: Any  # [pool pages, P, H]
    ring_k: Any = None  # [pairs · ring, P, H]
    ring_v: Any = None  # [pairs · ring, P, H]
    own_k: Any = None  # [resident pages, P, H]
    own_v: Any = None  # [resident pages, P, H]
    own_first: Any = None  # [B, K], a resident head's first page; -1 for the others
    k_scales: Any = None  # [pool pages, P], if K and V are in 8 bits
    v_scales: Any = None  # [pool pages, P]
    reach: Any = None  # [K, H], of the channels of K


@triton.jit
def first_own_page(pools, pair):
    """Returns a head's first resident page, or -1."""
    first = tl.full([], -1, tl.int32)
    if pools.own_first is not None:
        first = tl.load(pools.own_first + pair)
    return first


@triton.jit
def places(pools, head, own_first, slot, at, plan: tl.constexpr):
    """Returns the elements at which rows of K and V start, counted from pools.k and pools.v.

    The newest pages of a head are read from its ring, all pages of a resident head from the device,
    and other pages from pools.k and pools.v.
    """
    P: tl.constexpr = plan.page_size
    H: tl.constexpr = plan.head_dim
    if pools.ring_k is not None:
        page = slot // P
        ring = (head.pair.to(tl.int64) * plan.ring + page % plan.ring) * P + slot % P
        here = page > head.newest // P - plan.ring
        at_k = tl.where(here, away(pools.k, pools.ring_k) + ring * H, at * H)
        at_v = tl.where(here, away(pools.v, pools.ring_v) + ring * H, at * H)
    else:
        at_k, at_v = at * H, at * H
    if pools.own_first is not None:
        own = own_first.to(tl.int64) * P + slot
        at_k = tl.where(own_first >= 0, away(pools.k, pools.own_k) + own * H, at_k)
        at_v = tl.where(own_first >= 0, away(pools.v, pools.own_v) + own * H, at_v)
    return at_k, at_v


@triton.jit
def away(base_ptr, ptr):
    """Returns the number of elements between two arrays, a multiple of 16 bytes.

    Loads then stay as wide as within one array, and one load serves every memory.
    """
    unit: tl.constexpr = 128 // base_ptr.dtype.element_ty.primitive_bitwidth
    return (ptr.to(tl.int64) - base_ptr.to(tl.int64)) // 16 * unit
