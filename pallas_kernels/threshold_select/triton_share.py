"""Exchanges results among the programs that share a long row.

`plan` is a SearchedRow. The programs of a row follow the same path through a search, since each
adds the same numbers in the same order, so all have the same number of meetings.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jsparse.pallas_kernels.triton_meeting import meet


class Share(NamedTuple):
    """A program's part of a long row, and its exchange with the other programs.

    A post is one number per program, which all read after a meeting. Posts are overwritten two
    meetings later, which no program reaches before all have read.
    """

    begin: Any  # start of its part of the row; 0 if the row is not shared
    posts: Any  # [2, plan.parts, plan.posts]
    arrived: Any  # [], 0 before the first meeting


@triton.jit
def post(row, met, i, value, plan: tl.constexpr):
    """Writes this program's ith number for the next meeting, which is number `met`."""
    part = tl.program_id(0) % plan.parts
    tl.store(row.share.posts + ((met % 2) * plan.parts + part) * plan.posts + i, value)


@triton.jit
def posted(row, met, i, plan: tl.constexpr):
    """Returns the ith number of all programs, [parts], after a meeting."""
    part = tl.arange(0, plan.parts)
    at = row.share.posts + ((met % 2) * plan.parts + part) * plan.posts + i
    return tl.load(at, cache_modifier=".cg")  # written by other SMs


@triton.jit
def sum_before(numbers, plan: tl.constexpr):
    """Returns the sum of the numbers of the programs before this one."""
    earlier = tl.arange(0, plan.parts) < tl.program_id(0) % plan.parts
    return tl.sum(tl.where(earlier, numbers, 0.0), 0)


@triton.jit
def across(a, b, c, row, met, SUMS: tl.constexpr, plan: tl.constexpr):
    """Combines three numbers of all programs that share the row; also returns the meetings.

    With SUMS they are added; otherwise they become the minimum, the maximum, and 0.
    """
    if plan.parts > 1:
        post(row, met, 0, a, plan)
        post(row, met, 1, b, plan)
        post(row, met, 2, c, plan)
        meet(row.share.arrived, met, plan.parts)
        all_a, all_b = posted(row, met, 0, plan), posted(row, met, 1, plan)
        if SUMS:
            a, b, c = tl.reduce((all_a, all_b, posted(row, met, 2, plan)), 0, add_triples)
        else:
            a, b = tl.reduce((all_a, all_b), 0, extremes)
        met += 1
    return a, b, c, met


@triton.jit
def summed_up_across(a, b, c, low, top, row, met, plan: tl.constexpr):
    """Adds three numbers over all programs that share the row; also returns the meetings, last.

    Unless the row is searched by mass, `low` and `top` become the minimum and the maximum of all.
    """
    if plan.parts > 1:
        post(row, met, 0, a, plan)
        post(row, met, 1, b, plan)
        post(row, met, 2, c, plan)
        if not plan.mass:
            post(row, met, 3, low, plan)
            post(row, met, 4, top, plan)
        meet(row.share.arrived, met, plan.parts)
        all_a, all_b = posted(row, met, 0, plan), posted(row, met, 1, plan)
        a, b, c = tl.reduce((all_a, all_b, posted(row, met, 2, plan)), 0, add_triples)
        if not plan.mass:
            lows, tops = posted(row, met, 3, plan), posted(row, met, 4, plan)
            low, top = tl.reduce((lows, tops), 0, extremes)
        met += 1
    return a, b, c, low, top, met


@triton.jit
def add_pairs(a, b, c, d):
    """Computes two sums."""
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Computes three sums."""
    return a + d, b + e, c + f


@triton.jit
def extremes(low, top, other_low, other_top):
    """Computes a minimum and a maximum."""
    return tl.minimum(low, other_low), tl.maximum(top, other_top)
