"""Searches for the threshold of a row.

A reduction over a block costs as much as the arithmetic before it, so every pass measures two
thresholds, guessed well: first from the mean and spread of the scores, then between what is known.
Once few entries lie between, they are drawn out of the row, or listed under a budget, and compared
with each other: scores like a normal distribution's take two or three passes, and five or six, some
rows a dozen, where they are not. After two poor guesses a pass bisects, which bounds their number;
after one that separates nothing the next steps to the next value there is, since equal scores
cannot be separated.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_bits import ALL_TIES, mark, mark_first, trim
from jsparse.pallas_kernels.threshold_select.triton_few import draw, weigh_few
from jsparse.pallas_kernels.threshold_select.triton_last import last_that_fits
from jsparse.pallas_kernels.threshold_select.triton_rows import (
    SMALLEST,
    measure,
    next_below,
    row_extremes,
    row_moments,
    row_top,
    row_weight,
)
from jsparse.pallas_kernels.threshold_select.triton_tiles import (
    LOG2_E,
    NOTHING,
    exp2,
    from_key,
    key,
    log2,
    read,
    to_entries,
)

# Sums of a row vary with their order by about this factor: a set whose mass exceeds the wanted mass
# by less is accepted.
ROUNDING = tl.constexpr(1.0 + 2.0**-19)
MOST_PASSES = tl.constexpr(
    128
)  # at most 17 halve what lies between, and after two that do not one bisects 32 bits


@triton.jit
def choose(
    row,  # [plan.size]
    sizes,  # [plan.size], read where plan.sized
    words,  # [2 · plan.words]
    length,
    setting,
    plan: tl.constexpr,
):
    """Write the bitmap of what the rule chooses: at least one entry if any can be chosen.

    Args:
        row: the row's scores.
        sizes: what they count where the rule is a budget.
        words: memory for its bitmap, up to the end of the tile that holds the last score; as much
            behind it is used.
        length: the number of scores that count.
        setting: the rule's number.
        plan: a SearchedRow.
    """
    x = tl.zeros([1], tl.float32)
    if plan.resident:
        x = read(row, 0, length, plan)
    top, hi, end = 0.0, 0.0, length
    if plan.mass or plan.rule == "threshold":
        top = row_top(x, row, length, plan)
    if plan.rule == "threshold":
        t, ties = fixed(x, row, length, setting, top, plan)
    else:
        x, each, total, mean, spread = row_moments(x, row, sizes, length, top, plan)
        if plan.mass:
            lo, hi, wanted, enough = mass_bracket(length, setting, top, total, plan)
        else:
            lo, hi, wanted, enough = count_bracket(x, row, length, setting, total, plan)
        t, ties, end = search(
            *(x, each, row, sizes, length, words, top),
            *(lo, hi, total, wanted, enough, mean, spread, plan),
        )
    if plan.resident:
        mark(x, words, 0, t, ties, end, plan)
    else:
        for start in range(0, length, plan.tile):
            mark(
                to_entries(read(row, start, length, plan), top, plan),
                words + start // 32,
                start,
                t,
                ties,
                end,
                plan,
            )
    tl.debug_barrier()
    if ties != ALL_TIES:
        trim(words, sizes, length, ties, plan)
        tl.debug_barrier()
        # where nothing is above, it is the best that may not fit
        if plan.sized and from_key(key(t) + 1) >= hi:
            mark_first(words, length, plan)
            tl.debug_barrier()


@triton.jit
def fixed(x, row, length, setting, top, plan: tl.constexpr):
    """Return the threshold of everything above a given one.

    If nothing is above it, the threshold is that of the first of the largest entries.
    """
    bound = setting
    if plan.softmax:
        weight = tl.maximum(setting, 0.0)
        if not plan.normalised:
            weight *= row_weight(x, row, length, top, plan)
        bound = log2(weight) / LOG2_E
        if not plan.normalised:
            bound += top
    t = from_key(key(bound) + 1)  # the next float: above the bound is at least that
    some = top >= t
    return tl.where(some, t, top), tl.where(some, ALL_TIES, 1)


@triton.jit
def mass_bracket(length, p, top, total, plan: tl.constexpr):
    """Return a bracket of the wanted threshold, the wanted mass, and the mass not worth cutting.

    Entries that weigh less than (1 - p) of the mean add up to less than 1 - p of the whole, so none
    of them is needed.
    """
    least = (1.0 - p) * 0.999 * total / tl.maximum(length, 1).to(tl.float32)
    wanted = tl.maximum(p * total, SMALLEST)
    largest = total * 0.0 + 1.0 if plan.softmax else tl.maximum(top, SMALLEST)
    # of a row without scores the total is less than a largest weight would be
    enough = tl.where((p >= 1.0) | (total < 0.5 * largest), -NOTHING, wanted * ROUNDING)
    return tl.maximum(least, SMALLEST), from_key(key(largest) + 1), wanted, enough


@triton.jit
def count_bracket(x, row, length, k, total, plan: tl.constexpr):
    """Return a bracket of the wanted threshold, the number wanted, and the number that is enough.

    Under a budget the wanted threshold is that of the first entry that does not fit, which keeps
    more than the budget.
    """
    low, top = row_extremes(x, row, length, plan)
    hi = from_key(key(top) + 1)
    if plan.sized:
        budget = tl.maximum(k, 0.0)
        return low, hi, budget + 1.0, budget
    wanted = tl.minimum(tl.maximum(k, 1.0), total)
    return low, hi, wanted, wanted


@triton.jit
def search(
    x,
    each,
    row,
    sizes,
    length,
    words,
    top,
    lo,
    hi,
    total,
    wanted,
    enough,
    mean,
    spread,
    plan: tl.constexpr,
):
    """Find the largest threshold that keeps what is wanted, and how many of its ties are needed.

    Under a budget the second is what the sizes of its ties may add up to, and the third result says
    where the ties end of which all are kept, if that is known. Between passes `lo` keeps at least
    what is wanted (`at_lo` in all) and `hi` less (`at_hi`). A guess outside them is merely wasted.
    `words` is memory for two bitmaps.
    """
    at_lo, at_hi, highest, end = total, total * 0.0, hi, length
    center = mean + spread * deviations(wanted / tl.maximum(total, SMALLEST))
    t, u = from_place(center - 0.1 * spread, plan), from_place(center + 0.1 * spread, plan)
    one = total / tl.maximum(length, 1) if plan.sized else 1.0
    passes, slow = 0, 0
    going = is_open(lo, hi, at_lo, at_hi, enough, plan)
    while going:
        passes += 1
        at_t, at_u = measure(x, each, row, sizes, length, top, t, u, plan)
        before = at_lo - at_hi
        lo, at_lo, hi, at_hi = narrow(t, at_t, wanted, lo, at_lo, hi, at_hi)
        lo, at_lo, hi, at_hi = narrow(u, at_u, wanted, lo, at_lo, hi, at_hi)
        start = to_place(lo, plan)
        width = to_place(hi, plan) - start
        slow = tl.where(at_lo - at_hi > 0.5 * before, slow + 1, 0)
        # nothing was separated: step to the next value, since equal ones cannot be
        if at_lo - at_hi == before:
            t = next_below(x, each, row, sizes, length, top, hi, plan)
            hi = from_key(key(t) + 1)
            u = from_place(start + 0.5 * width, plan)
        elif slow >= 2:  # two poor guesses: bisect the keys, and the axis of guesses
            slow = 0
            t = from_key(
                key(lo)
                + ((key(hi) - key(lo)).to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
            )
            u = from_place(start + 0.5 * width, plan)
        else:
            # interpolate; the two guesses are a tenth of the bracket apart
            share = tl.minimum(tl.maximum((at_lo - wanted) / (at_lo - at_hi), 0.01), 0.99)
            start += 0.9 * share * width
            t, u = from_place(start, plan), from_place(start + 0.1 * width, plan)
            if plan.slots > 0 and is_few(one, lo, hi, at_lo, at_hi, enough, plan):
                if plan.sized:
                    last, until, known = last_that_fits(
                        *(x, row, sizes, length, words, lo, hi, at_hi, enough, highest, plan)
                    )
                    lo, end = tl.where(known, last, lo), tl.where(known, until, end)
                    at_lo = tl.where(known, enough, at_lo)
                else:
                    draw(x, lo, hi, words, plan)
                    t, lo, at_lo, hi, at_hi = weigh_few(words, wanted, lo, at_lo, hi, at_hi, plan)
                    u = from_key(key(t) + 1)
        going = is_open(lo, hi, at_lo, at_hi, enough, plan) & (passes < MOST_PASSES)
    if plan.sized:
        return lo, tl.where(at_lo <= enough, ALL_TIES, (enough - at_hi).to(tl.int32)), end
    # what is left between the bounds equals lo: take the ties that are needed, or all
    one = lo if plan.mass else 1.0
    number = (at_lo - at_hi) / one
    needed = tl.ceil((wanted - at_hi) / one)
    whole = (at_lo <= enough) | (number < 1.5) | (needed > number - 0.5)
    return lo, tl.where(whole, ALL_TIES, needed.to(tl.int32)), end


@triton.jit
def is_open(lo, hi, at_lo, at_hi, enough, plan: tl.constexpr):
    """Return whether more than one entry may lie in the bracket.

    Each weighs at least lo, and sums are not exact.
    """
    going = (at_lo > enough) & (key(hi) - 1 != key(lo))
    if plan.mass:
        going &= at_lo - at_hi >= 1.5 * lo
    return going


@triton.jit
def is_few(one, lo, hi, at_lo, at_hi, enough, plan: tl.constexpr):
    """Return whether the bracket holds more than one entry, and no more than fit into the slots.

    An entry counts `one`, on average where entries have sizes, or at least lo.
    """
    most = at_lo - at_hi <= plan.slots * (lo if plan.mass else one)
    return most & is_open(lo, hi, at_lo, at_hi, enough, plan)


@triton.jit
def narrow(t, at_t, wanted, lo, at_lo, hi, at_hi):
    """Return the bracket after a measurement."""
    up, down = (at_t >= wanted) & (t >= lo), (at_t < wanted) & (t <= hi)
    return (
        tl.where(up, t, lo),
        tl.where(up, at_t, at_lo),
        tl.where(down, t, hi),
        tl.where(down, at_t, at_hi),
    )


@triton.jit
def to_place(t, plan: tl.constexpr):
    """Return where a threshold lies on the axis of guesses, that of the scores."""
    return log2(t) if plan.mass else t


@triton.jit
def from_place(place, plan: tl.constexpr):
    """Return the threshold at a place on the axis of guesses."""
    return exp2(place) if plan.mass else place


@triton.jit
def deviations(share):
    """Estimate the deviation of a normal distribution above which this share of its mass lies.

    The result is in standard deviations above the mean, within 5 %.
    """
    share = tl.minimum(tl.maximum(share, 1e-7), 1.0 - 1e-6)
    far = tl.sqrt(tl.maximum(-1.0888 * log2(4.0 * share * (1.0 - share)), 0.0))
    return tl.where(share < 0.5, far, -far)
