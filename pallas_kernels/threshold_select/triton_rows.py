"""Reduces a whole row to sums and extremes.

They are of the tile `x` [T, R, 4] where the row is resident, else of the tiles of `row`, in memory,
one by one. What entries count is `each` where the row is resident, else read beside it.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_tiles import (
    LOG2_E,
    NOTHING,
    above,
    add_pairs,
    add_triples,
    counted,
    extremes,
    highest_below,
    in_thread,
    log2,
    moments,
    read,
    thread_low,
    thread_top,
    to_entries,
    weigh,
)

SMALLEST = tl.constexpr(2.0**-125)  # more than the weight of what cannot be chosen


@triton.jit
def row_top(x, row, length, plan: tl.constexpr):
    """Return the row's largest score; 0 where it has none, so that differences stay numbers."""
    if plan.resident:
        best = thread_top(x)
    else:
        best = tl.full([plan.threads], NOTHING, tl.float32)
        for start in range(0, length, plan.tile):
            best = tl.maximum(best, thread_top(read(row, start, length, plan)))
    top = tl.max(best, 0)
    return tl.where(top == NOTHING, 0.0, top)


@triton.jit
def row_extremes(x, row, length, plan: tl.constexpr):
    """Return the row's smallest and largest score that can be chosen.

    Where there is none, the first is above the second.
    """
    if plan.resident:
        low, top = thread_low(x), thread_top(x)
    else:
        low = tl.full([plan.threads], -NOTHING, tl.float32)
        top = tl.full([plan.threads], NOTHING, tl.float32)
        for start in range(0, length, plan.tile):
            tile = read(row, start, length, plan)
            low, top = extremes(low, top, thread_low(tile), thread_top(tile))
    return tl.reduce((low, top), 0, extremes)


@triton.jit
def row_weight(x, row, length, top, plan: tl.constexpr):
    """Return the sum of the row's weights, relative to its top."""
    if plan.resident:
        sums = in_thread(weigh(x, top, plan)[0])
    else:
        sums = tl.full([plan.threads], 0.0, tl.float32)
        for start in range(0, length, plan.tile):
            sums += in_thread(weigh(read(row, start, length, plan), top, plan)[0])
    return tl.sum(sums, 0)


@triton.jit
def row_moments(x, row, sizes, length, top, plan: tl.constexpr):
    """Return what a resident row is searched by and counts, its total, and its mean and spread.

    Mean and spread are on the axis of guesses.
    """
    each = 0.0
    if plan.resident:
        x, each, a, b, c = moments(x, sizes, 0, length, top, plan)
    else:
        a = tl.full([plan.threads], 0.0, tl.float32)
        b = tl.full([plan.threads], 0.0, tl.float32)
        c = tl.full([plan.threads], 0.0, tl.float32)
        for start in range(0, length, plan.tile):
            tile = read(row, start, length, plan)
            _, _, more_a, more_b, more_c = moments(tile, sizes, start, length, top, plan)
            a += more_a
            b += more_b
            c += more_c
    total, first, second = tl.reduce((a, b, c), 0, add_triples)
    share = 1.0 / tl.maximum(total, SMALLEST)
    mean = first * share
    return x, each, total, mean, tl.sqrt(tl.maximum(second * share - mean * mean, 0.0))


@triton.jit
def measure(x, each, row, sizes, length, top, t, u, plan: tl.constexpr):
    """Measure how much of the row is at least t, and at least u."""
    if plan.resident:
        a, b = above(x, each, t), above(x, each, u)
    else:
        a, b = tl.full([plan.threads], 0.0, tl.float32), tl.full([plan.threads], 0.0, tl.float32)
        for start in range(0, length, plan.tile):
            tile = to_entries(read(row, start, length, plan), top, plan)
            counts = counted(tile, sizes, start, length, plan)
            a += above(tile, counts, t)
            b += above(tile, counts, u)
    return tl.reduce((a, b), 0, add_pairs)


@triton.jit
def next_below(x, each, row, sizes, length, top, hi, plan: tl.constexpr):
    """Return the largest entry below hi that counts; 0 where it is -0, whose key is another."""
    if plan.resident:
        best = highest_below(x, each, hi, plan)
    else:
        best = tl.full([plan.threads], NOTHING, tl.float32)
        for start in range(0, length, plan.tile):
            tile = to_entries(read(row, start, length, plan), top, plan)
            counts = counted(tile, sizes, start, length, plan)
            best = tl.maximum(best, highest_below(tile, counts, hi, plan))
    return tl.max(best, 0) + 0.0


@triton.jit
def log_sum(row, length, plan: tl.constexpr):
    """Return the logsumexp of a row; 0 where it has none."""
    x = tl.zeros([1], tl.float32)
    if plan.resident:
        x = read(row, 0, length, plan)
    top = row_top(x, row, length, plan)
    weight = row_weight(x, row, length, top, plan)
    return tl.where(weight > 0, top + log2(weight) / LOG2_E, 0.0)
