"""Lets the programs that share a long row tell each other what they have found in their parts.

`plan` is a SearchedRow. The programs of a row go the same way through a search, since each adds up
the same numbers in the same order; so all meet equally often.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jsparse.pallas_kernels.triton_meeting import meet


class Share(NamedTuple):
    """Holds the part of a long row that a program has, and what it tells those of the others.

    A post is a number of each program, which all read after they have met. Posts of a meeting are
    overwritten by those of the one after the next, which no program reaches before all have read.
    """

    begin: Any  # where its part of the row begins; 0 of a row that is not shared
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
    return tl.load(at, cache_modifier=".cg")  # other multiprocessors have written


@triton.jit
def sum_before(numbers, plan: tl.constexpr):
    """Returns the sum of the numbers of the programs before this one."""
    earlier = tl.arange(0, plan.parts) < tl.program_id(0) % plan.parts
    return tl.sum(tl.where(earlier, numbers, 0.0), 0)


@triton.jit
def across(a, b, c, row, met, SUMS: tl.constexpr, plan: tl.constexpr):
    """Combines three numbers of all programs that share the row, and returns the meetings.

    They are added up, or else, the first is the lowest, the second the highest, and the third 0.
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
    """Adds up three numbers of all programs that share the row, and returns the meetings at last.

    Unless it is searched by mass, `low` and `top` become the lowest and the highest of all.
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
    """Combines two sums."""
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Combines three sums."""
    return a + d, b + e, c + f


@triton.jit
def extremes(low, top, other_low, other_top):
    """Combines a minimum and a maximum."""
    return tl.minimum(low, other_low), tl.maximum(top, other_top)
