"""Reads rows of scores by tiles, and reduces tiles and whole rows to sums and extremes.

A tile is [T, R, 4]: T threads have R runs of four neighbours each, so that loads are coalesced and
sums over the last two axes stay within a thread. A row that fits one tile is read once and stays in
registers; every pass reads a longer one again, mostly from L2.

`plan` is a SearchedRow.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select import reference
from jsparse.pallas_kernels.threshold_select.triton_share import (
    across,
    add_pairs,
    add_triples,
    extremes,
    summed_up_across,
)

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
MIN_LOG = tl.constexpr(-126.0)  # of 2^-126, the minimum weight, which is never selected
TINY, HIGHEST = tl.constexpr(reference.TINY), tl.constexpr(reference.HIGHEST)
REACH = tl.constexpr(reference.REACH)
SMALLEST = tl.constexpr(2.0**-125)  # more than the weight of entries that cannot be selected


class First(NamedTuple):
    """Constants that raise the scores that precede all others; read if plan.unit.

    These scores are those before `sinks`, and those from `recent` to `end`.
    """

    sinks: Any
    recent: Any
    end: Any
    low: Any  # the smallest score, times REACH
    floor: Any  # its raised value, above the largest score


class Row(NamedTuple):
    """A row to search."""

    x: Any  # its one tile [T, R, 4] if resident: scores, or the values that are searched
    each: Any  # counts of the entries of that tile, from `row_summary`
    scores: Any  # the row in memory, [plan.size]
    sizes: Any  # counts of its entries there, [plan.size]; read if plan.sized
    length: Any  # number of valid scores
    top: Any  # its largest score if weights are relative to it, else 0
    room: Any  # memory for drawn entries
    share: Any  # exchange with the programs that share it
    first: Any  # constants for scores that precede all others


@triton.jit
def read(row, start, length, plan: tl.constexpr, PAST: tl.constexpr = NOTHING):
    """Loads a tile of a row in memory, [T, R, 4], with `PAST` (-inf) past the length.

    Whole runs are loaded, so that loads stay 16 bytes wide.
    """
    run = first_of_runs(plan)
    entry = run + tl.arange(0, 4)[None, None, :]
    inside = tl.broadcast_to(start + run < length, [plan.threads, plan.runs, 4])
    if plan.size % 4:  # the last run extends past the row
        inside &= start + entry < plan.size
    scores = tl.load(row + start + entry, mask=inside, other=PAST).to(tl.float32)
    return tl.where(start + entry < length, scores, PAST)


@triton.jit
def read_row(row, start, plan: tl.constexpr):
    """Loads a tile of a row as it is searched: scores that precede all others are raised."""
    return raised(read(row.scores, start, row.length, plan), row, start, plan)


@triton.jit
def raised(scores, row, start, plan: tl.constexpr):
    """Raises the scores of a tile that precede all others."""
    if plan.unit:
        entry = start + first_of_runs(plan) + tl.arange(0, 4)[None, None, :]
        first = entry < row.first.sinks
        if plan.recent > 0:  # from there to the end: numbers before it are large as unsigned
            behind = (entry - row.first.recent).to(tl.uint32, bitcast=True)
            first |= behind < (row.first.end - row.first.recent).to(tl.uint32, bitcast=True)
        scores = tl.where(scores > HIGHEST, HIGHEST, scores)
        # -inf and NaN are unchanged
        scores = tl.where(first, row.first.floor + (scores * REACH - row.first.low), scores)
    return scores


@triton.jit
def first_of_runs(plan: tl.constexpr):
    """Returns the start of each thread's runs in a tile, [T, R, 1]."""
    T: tl.constexpr = plan.threads
    return (tl.arange(0, plan.runs)[None, :, None] * T + tl.arange(0, T)[:, None, None]) * 4


@triton.jit
def weigh(scores, top, plan: tl.constexpr):
    """Returns weights and their logarithms to base 2.

    If scores are logits, weights are relative to the row's largest. The weight of -inf and of NaN
    (the maximum of a number and NaN is the number) is too small to be selected or to count.
    """
    if plan.softmax:
        logs = tl.maximum((scores - top) * LOG2_E, MIN_LOG)
        return exp2(logs), logs
    weights = tl.maximum(scores, 0.0)
    return weights, tl.maximum(log2(weights), MIN_LOG)


@triton.jit
def to_entries(scores, top, plan: tl.constexpr):
    """Returns the values by which a row is searched: its weights, or its scores."""
    if plan.mass:
        return weigh(scores, top, plan)[0]
    return scores


@triton.jit
def counted(x, row, start, plan: tl.constexpr):
    """Returns the contribution of each entry of a tile to a sum: its weight, its size, or 1."""
    if plan.mass:
        return x
    elif plan.sized:
        return read(row.sizes, start, row.length, plan, 0)
    else:
        return 1.0


@triton.jit
def moments(scores, row, start, plan: tl.constexpr):
    """Returns a tile's searched values, its entries' counts, and each thread's total and moments.

    The first two moments are of the logarithms by weight, or of the scores by number or size.
    """
    if plan.mass:
        weights, logs = weigh(scores, row.top, plan)
        by_log = weights * logs
        return weights, weights, in_thread(weights), in_thread(by_log), in_thread(by_log * logs)
    finite = scores > NOTHING
    known = tl.where(finite, scores, 0.0)
    each = counted(scores, row, start, plan)
    number, first = finite.to(tl.float32) * each, known * each
    return scores, each, in_thread(number), in_thread(first), in_thread(first * known)


@triton.jit
def above(x, each, t):
    """Sums by thread the counts of the tile's entries that are at least t."""
    at_least = tl.inline_asm_elementwise(  # 1.0 or 0.0, in one instruction
        "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, t], dtype=tl.float32, is_pure=True, pack=1
    )
    return in_thread(at_least * each)


@triton.jit
def highest_below(x, each, hi, plan: tl.constexpr):
    """Returns each thread's largest entry below hi with a nonzero count."""
    below = x < hi
    if plan.sized:
        below &= each > 0
    return thread_top(tl.where(below, x, NOTHING))


@triton.jit
def in_thread(x):
    """Sums a tile by thread, to [T]."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def thread_top(scores):
    """Returns each thread's largest score."""
    return tl.max(tl.max(scores, 2), 1)


@triton.jit
def thread_low(scores):
    """Returns each thread's smallest score that can be selected."""
    return tl.min(tl.min(tl.where(scores > NOTHING, scores, -NOTHING), 2), 1)


@triton.jit
def thread_extremes(scores, plan: tl.constexpr):
    """Returns each thread's smallest and largest score that can be selected, if needed."""
    if plan.mass:
        none = tl.full([plan.threads], 0.0, tl.float32)
        return none, none
    else:
        return thread_low(scores), thread_top(scores)


@triton.jit
def next_key(bits, sign, below, lowest):
    """Returns each thread's largest key from `lowest` to under `below`, or a lower one.

    Keys are bits, or 2^31 - 1 - bits for negative numbers. With `below` subtracted, keys under it
    are the largest as unsigned integers.
    """
    distance = multiply_add(bits, sign, (tl.where(sign < 0, 0x7FFFFFFF, 0) - below)[:, None, None])
    found = (
        tl.max(tl.max(distance.to(tl.uint32, bitcast=True), 2), 1).to(tl.int32, bitcast=True)
        + below
    )
    return tl.where((found >= lowest) & (found < below), found, lowest - 1)


@triton.jit
def multiply_add(x, factor, term):
    """Computes x · factor + term on integers in one instruction.

    It is recomputed at each use, since keeping x · factor would take registers.
    """
    return tl.inline_asm_elementwise(
        "mad.lo.s32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [x, factor, term],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def key(x):
    """Returns the bits of a float as an integer of the same order."""
    # floats are sign and magnitude, so the other bits of negative ones are inverted
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(k):
    """Returns the float of a key, the inverse of `key`."""
    return (k ^ ((k >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp2(x):
    """Returns 2 to the power of x, 0 below 2^-126."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log2(x):
    """Returns the logarithm to base 2; subnormals count as 0."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def take(scores, sizes, length, room, share, held, plan: tl.constexpr):
    """Returns the Row at `scores`, or a program's part of it, loaded if it is resident.

    No scores are raised yet. `held` points to the head's number of tokens; None: no scores come
    first, whatever the plan says.
    """
    first = First(0, 0, 0, 0.0, 0.0)
    if plan.unit and held is not None:
        slots = tl.load(held)
        end = tl.cdiv(slots, plan.unit)
        recent = tl.maximum(slots - plan.recent, 0) // plan.unit if plan.recent > 0 else end
        first = First(tl.cdiv(tl.minimum(slots, plan.sink), plan.unit), recent, end, 0.0, 0.0)
    x = tl.zeros([1], tl.float32)
    if plan.resident:
        x = read(scores, share.begin, length, plan)
    return Row(x, 0.0, scores, sizes, length, 0.0, room, share, first)


@triton.jit
def changed(row, x, each, top, first):
    """Returns the row with another tile, counts of its entries, top, and raised scores."""
    scores, sizes, length, room, share = row.scores, row.sizes, row.length, row.room, row.share
    return Row(x, each, scores, sizes, length, top, room, share, first)


@triton.jit
def with_first_raised(row, low, top, plan: tl.constexpr):
    """Returns the row with its first scores raised above all others, and a new bound of its scores.

    `low` and `top` are its smallest and largest score before.
    """
    top = tl.minimum(top, HIGHEST)
    floor = tl.where(tl.abs(top) < TINY, TINY, from_key(key(top) + 1))
    first = First(row.first.sinks, row.first.recent, row.first.end, low * REACH, floor)
    row = changed(row, row.x, row.each, row.top, first)
    if plan.resident:
        x = raised(row.x, row, row.share.begin, plan)
        row = changed(row, x, row.each, row.top, row.first)
    return row, floor + (top * REACH - low * REACH)


@triton.jit
def with_top(row, met, plan: tl.constexpr):
    """Returns the row with its largest score; 0 if it has none, so that differences are finite.

    The second result is the number of meetings of the programs that share it.
    """
    if plan.resident:
        best = thread_top(row.x)
    else:
        best = tl.full([plan.threads], NOTHING, tl.float32)
        for start in range(0, row.length, plan.tile):
            best = tl.maximum(best, thread_top(read(row.scores, start, row.length, plan)))
    top = tl.max(best, 0)
    _, top, _, met = across(top, top, 0.0, row, met, False, plan)
    top = tl.where(top == NOTHING, 0.0, top)
    return changed(row, row.x, row.each, top, row.first), met


@triton.jit
def row_weight(row, met, plan: tl.constexpr):
    """Returns the sum of the row's weights, relative to its top, and the number of meetings."""
    if plan.resident:
        sums = in_thread(weigh(row.x, row.top, plan)[0])
    else:
        sums = tl.full([plan.threads], 0.0, tl.float32)
        for start in range(0, row.length, plan.tile):
            sums += in_thread(weigh(read(row.scores, start, row.length, plan), row.top, plan)[0])
    weight, _, _, met = across(tl.sum(sums, 0), 0.0, 0.0, row, met, True, plan)
    return weight, met


@triton.jit
def row_summary(row, met, plan: tl.constexpr):
    """Returns the row as it is searched, its total, and its mean and spread on the axis of guesses.

    Unless it is searched by mass, its smallest and largest selectable scores follow; with no such
    score, the first is above the second. The last result is the number of meetings. A resident row
    then has its searched values and its entries' counts.
    """
    x, each = row.x, 0.0
    if plan.resident:
        x, each, a, b, c = moments(x, row, 0, plan)
        low, top = thread_extremes(row.x, plan)
    else:
        a = tl.full([plan.threads], 0.0, tl.float32)
        b = tl.full([plan.threads], 0.0, tl.float32)
        c = tl.full([plan.threads], 0.0, tl.float32)
        low = tl.full([plan.threads], -NOTHING, tl.float32)
        top = tl.full([plan.threads], NOTHING, tl.float32)
        for start in range(0, row.length, plan.tile):
            tile = read(row.scores, start, row.length, plan)
            low, top = extremes(low, top, *thread_extremes(tile, plan))
            a, b, c = add_triples(a, b, c, *moments(tile, row, start, plan)[2:])
    a, b, c = tl.reduce((a, b, c), 0, add_triples)
    if plan.mass:
        low, top = a, b  # not requested
    else:
        low, top = tl.reduce((low, top), 0, extremes)
    total, first, second, low, top, met = summed_up_across(a, b, c, low, top, row, met, plan)
    share = 1.0 / tl.maximum(total, SMALLEST)
    mean = first * share
    spread = tl.sqrt(tl.maximum(second * share - mean * mean, 0.0))
    return changed(row, x, each, row.top, row.first), total, mean, spread, low, top, met


@triton.jit
def measure(row, t, u, met, plan: tl.constexpr):
    """Measures how much of the row is at least t, and at least u; also returns the meetings."""
    if plan.resident:
        a, b = above(row.x, row.each, t), above(row.x, row.each, u)
    else:
        a, b = tl.full([plan.threads], 0.0, tl.float32), tl.full([plan.threads], 0.0, tl.float32)
        for start in range(0, row.length, plan.tile):
            tile = to_entries(read_row(row, start, plan), row.top, plan)
            counts = counted(tile, row, start, plan)
            a += above(tile, counts, t)
            b += above(tile, counts, u)
    a, b = tl.reduce((a, b), 0, add_pairs)
    a, b, _, met = across(a, b, 0.0, row, met, True, plan)
    return a, b, met


@triton.jit
def next_below(row, hi, met, plan: tl.constexpr):
    """Returns the largest counted entry below hi, and the number of meetings.

    -0 is returned as 0, since its key differs.
    """
    if plan.resident:
        best = highest_below(row.x, row.each, hi, plan)
    else:
        best = tl.full([plan.threads], NOTHING, tl.float32)
        for start in range(0, row.length, plan.tile):
            tile = to_entries(read_row(row, start, plan), row.top, plan)
            counts = counted(tile, row, start, plan)
            best = tl.maximum(best, highest_below(tile, counts, hi, plan))
    best = tl.max(best, 0)
    _, best, _, met = across(best, best, 0.0, row, met, False, plan)
    return best + 0.0, met
