"""Searches for the threshold of a row.

A reduction over a block costs the same as the arithmetic before it, so every pass measures two
well-guessed thresholds: first from the mean and spread of the scores, then between known ones.
After two poor guesses a pass bisects, which bounds the number of passes. After a pass that
separates nothing, the next steps to the next existing value, since equal scores cannot be
separated.

Once few entries of a resident row remain between the bounds, they are drawn from it, or listed
under a budget, and compared with each other. Scores like a normal distribution's take two or three
passes; others five or six, some rows a dozen. Drawn entries are compared by their bits, whose order
is that of the numbers on one side of 0. Some cannot be drawn: those on the other side of 0,
repeated values in a thread, and a thread's fifth and later ones. The sum is then incomplete, and
the search continues.

`plan` is a SearchedRow.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_bits import (
    ALL_TIES,
    list_entries,
    mark,
    mark_first,
    pack,
    trim,
    word_index,
)
from jsparse.pallas_kernels.threshold_select.triton_share import post, posted, sum_before
from jsparse.pallas_kernels.threshold_select.triton_tiles import (
    LOG2_E,
    NOTHING,
    SMALLEST,
    exp2,
    from_key,
    in_thread,
    key,
    log2,
    measure,
    next_below,
    next_key,
    read_row,
    row_summary,
    row_weight,
    to_entries,
    with_first_raised,
    with_top,
)
from jsparse.pallas_kernels.triton_meeting import meet

# Sums of a row vary with their order by about this factor: a set that exceeds the wanted mass by
# less is accepted.
ROUNDING = tl.constexpr(1.0 + 2.0**-19)
# at most 17 halve the interval; after two that do not, one bisects 32 bits
MAX_PASSES = tl.constexpr(128)


class Bracket(NamedTuple):
    """Two thresholds around the right one, and the number that each keeps."""

    lo: Any  # keeps at least the wanted number
    hi: Any  # keeps less
    at_lo: Any
    at_hi: Any


@triton.jit
def choose(
    row,  # from `take`
    words,  # [2 · plan.words]: the bitmap, up to the end of the last score's tile, and scratch
    setting,  # the rule's number
    met,  # number of meetings so far of the programs that share the row
    plan: tl.constexpr,
):
    """Writes the bitmap of the entries that the rule selects: at least one if any is eligible.

    Each program writes its part of a shared row. Returns the number of meetings.
    """
    sizes, length = row.sizes, row.length
    if plan.mass or plan.rule == "threshold":
        row, met = with_top(row, met, plan)
    hi, end = 0.0, length
    if plan.rule == "threshold":
        t, ties, met = fixed(row, setting, met, plan)
    else:
        row, total, mean, spread, low, top, met = row_summary(row, met, plan)
        if plan.mass:
            lo, hi, wanted, enough = mass_bracket(row, setting, total, plan)
        else:
            if plan.unit:
                row, top = with_first_raised(row, low, top, plan)
            lo, hi, wanted, enough = count_bracket(low, top, setting, total, plan)
        bracket = Bracket(lo, hi, total, total * 0.0)
        t, ties, end, met = search(row, words, bracket, wanted, enough, mean, spread, met, plan)
    begin = row.share.begin
    own = words + begin // 32
    if plan.resident:
        mark(row.x, own, begin, t, ties, end, plan)
    else:
        for start in range(0, length, plan.tile):
            tile = to_entries(read_row(row, start, plan), row.top, plan)
            mark(tile, words + start // 32, start, t, ties, end, plan)
    tl.debug_barrier()
    if ties != ALL_TIES:
        if plan.parts > 1:  # ties of earlier parts come first
            equal = tl.sum(in_thread((row.x == t).to(tl.float32)), 0)
            post(row, met, 0, equal, plan)
            meet(row.share.arrived, met, plan.parts)
            earlier = sum_before(posted(row, met, 0, plan), plan).to(tl.int32)
            ties = tl.minimum(tl.maximum(ties - earlier, 0), equal.to(tl.int32))
            met += 1
        trim(own, sizes, tl.minimum(length - begin, plan.part), ties, plan)
        tl.debug_barrier()
        # if nothing is above, the best may not fit
        if plan.sized and from_key(key(t) + 1) >= hi:
            mark_first(words, length, plan)
            tl.debug_barrier()
    return met


@triton.jit
def fixed(row, setting, met, plan: tl.constexpr):
    """Returns the threshold of all entries above a given one, and the number of meetings.

    If nothing is above it, the threshold is that of the first of the largest entries.
    """
    bound = setting
    if plan.softmax:
        weight = tl.maximum(setting, 0.0)
        if not plan.normalised:
            whole, met = row_weight(row, met, plan)
            weight *= whole
        bound = log2(weight) / LOG2_E
        if not plan.normalised:
            bound += row.top
    t = from_key(key(bound) + 1)  # the next float: the minimum of numbers above the bound
    some = row.top >= t
    return tl.where(some, t, row.top), tl.where(some, ALL_TIES, 1), met


@triton.jit
def mass_bracket(row, p, total, plan: tl.constexpr):
    """Returns a bracket of the wanted threshold, the wanted mass, and the mass not worth cutting.

    Entries that weigh less than (1 - p) of the mean add up to less than 1 - p of the whole, so none
    of them is needed.
    """
    lowest = (1.0 - p) * 0.999 * total / tl.maximum(row.length, 1).to(tl.float32)
    wanted = tl.maximum(p * total, SMALLEST)
    largest = total * 0.0 + 1.0 if plan.softmax else tl.maximum(row.top, SMALLEST)
    # the total of a row without scores is less than any largest weight
    enough = tl.where((p >= 1.0) | (total < 0.5 * largest), -NOTHING, wanted * ROUNDING)
    return tl.maximum(lowest, SMALLEST), from_key(key(largest) + 1), wanted, enough


@triton.jit
def count_bracket(low, top, k, total, plan: tl.constexpr):
    """Returns a bracket of the wanted threshold, the wanted number, and a sufficient number.

    Under a budget the wanted threshold is that of the first entry that does not fit, which keeps
    more than the budget.
    """
    hi = from_key(key(top) + 1)
    if plan.sized:
        budget = tl.maximum(k, 0.0)
        return low, hi, budget + 1.0, budget
    wanted = tl.minimum(tl.maximum(k, 1.0), total)
    return low, hi, wanted, wanted


@triton.jit
def search(row, words, bracket, wanted, enough, mean, spread, met, plan: tl.constexpr):
    """Finds the largest threshold that keeps the wanted amount, and the number of its ties to keep.

    Under a budget the second result is the maximum sum of the sizes of its ties, and the third is
    the end of the ties if all before it are kept and it is known. The last result is the number of
    meetings. The initial bracket spans the whole row; a guess outside it is merely wasted. `words`
    is memory for two bitmaps.
    """
    total, highest, end = bracket.at_lo, bracket.hi, row.length
    center = mean + spread * deviations(wanted / tl.maximum(total, SMALLEST))
    t, u = from_place(center - 0.1 * spread, plan), from_place(center + 0.1 * spread, plan)
    one = total / tl.maximum(row.length, 1) if plan.sized else 1.0
    passes, slow = 0, 0
    going = is_open(bracket, enough, plan)
    while going:
        passes += 1
        at_t, at_u, met = measure(row, t, u, met, plan)
        before = bracket.at_lo - bracket.at_hi
        bracket = narrow(narrow(bracket, t, at_t, wanted), u, at_u, wanted)
        lo, hi, at_lo, at_hi = bracket
        start = to_place(lo, plan)
        width = to_place(hi, plan) - start
        slow = tl.where(at_lo - at_hi > 0.5 * before, slow + 1, 0)
        # nothing was separated: step to the next value, since equal ones cannot be
        if at_lo - at_hi == before:
            t, met = next_below(row, hi, met, plan)
            bracket = Bracket(lo, from_key(key(t) + 1), at_lo, at_hi)
            u = from_place(start + 0.5 * width, plan)
        elif slow >= 2:  # two poor guesses: bisect the keys, and the axis of guesses
            slow = 0
            low = key(lo)
            half = (key(hi) - low).to(tl.uint32, bitcast=True) >> 1
            t = from_key(low + half.to(tl.int32, bitcast=True))
            u = from_place(start + 0.5 * width, plan)
        else:
            # interpolate; the two guesses are a tenth of the bracket apart
            share = tl.minimum(tl.maximum((at_lo - wanted) / (at_lo - at_hi), 0.01), 0.99)
            start += 0.9 * share * width
            t, u = from_place(start, plan), from_place(start + 0.1 * width, plan)
            if plan.slots > 0 and is_few(bracket, one, enough, plan):
                if plan.sized:
                    last, until, known = last_that_fits(row, words, bracket, enough, highest, plan)
                    lo, end = tl.where(known, last, lo), tl.where(known, until, end)
                    bracket = Bracket(lo, hi, tl.where(known, enough, at_lo), at_hi)
                else:
                    met = draw(row, lo, hi, met, plan)
                    t, bracket = weigh_few(row.room, wanted, bracket, plan)
                    u = from_key(key(t) + 1)
        going = is_open(bracket, enough, plan) & (passes < MAX_PASSES)
    lo, hi, at_lo, at_hi = bracket
    if plan.sized:
        return lo, tl.where(at_lo <= enough, ALL_TIES, (enough - at_hi).to(tl.int32)), end, met
    # all entries between the bounds equal lo: take the ties that are needed, or all
    one = lo if plan.mass else 1.0
    number = (at_lo - at_hi) / one
    needed = tl.ceil((wanted - at_hi) / one)
    whole = (at_lo <= enough) | (number < 1.5) | (needed > number - 0.5)
    return lo, tl.where(whole, ALL_TIES, needed.to(tl.int32)), end, met


@triton.jit
def is_open(bracket, enough, plan: tl.constexpr):
    """Returns whether more than one entry may be in the bracket.

    Each weighs at least lo, and sums are not exact.
    """
    going = (bracket.at_lo > enough) & (key(bracket.hi) - 1 != key(bracket.lo))
    if plan.mass:
        going &= bracket.at_lo - bracket.at_hi >= 1.5 * bracket.lo
    return going


@triton.jit
def is_few(bracket, one, enough, plan: tl.constexpr):
    """Returns whether the bracket has more than one entry, and no more than fit into the slots.

    An entry counts `one`, on average if entries have sizes, or at least lo.
    """
    # programs that share a row each have a part of the slots: leave room for imbalance
    slots = plan.slots * plan.parts // (2 if plan.parts > 1 else 1)
    few = bracket.at_lo - bracket.at_hi <= slots * (bracket.lo if plan.mass else one)
    return few & is_open(bracket, enough, plan)


@triton.jit
def narrow(bracket, t, at_t, wanted):
    """Returns the bracket after a measurement."""
    lo, hi, at_lo, at_hi = bracket
    up, down = (at_t >= wanted) & (t >= lo), (at_t < wanted) & (t <= hi)
    lo, at_lo = tl.where(up, t, lo), tl.where(up, at_t, at_lo)
    hi, at_hi = tl.where(down, t, hi), tl.where(down, at_t, at_hi)
    return Bracket(lo, hi, at_lo, at_hi)


@triton.jit
def to_place(t, plan: tl.constexpr):
    """Returns a threshold's position on the axis of guesses, that of the scores."""
    return log2(t) if plan.mass else t


@triton.jit
def from_place(place, plan: tl.constexpr):
    """Returns the threshold at a position on the axis of guesses."""
    return exp2(place) if plan.mass else place


@triton.jit
def deviations(share):
    """Estimates the deviation of a normal distribution above which this share of its mass is.

    The result is in standard deviations above the mean, within 5 %.
    """
    share = tl.minimum(tl.maximum(share, 1e-7), 1.0 - 1e-6)
    far = tl.sqrt(tl.maximum(-1.0888 * log2(4.0 * share * (1.0 - share)), 0.0))
    return tl.where(share < 0.5, far, -far)


@triton.jit
def last_that_fits(row, words, bracket, budget, highest, plan: tl.constexpr):
    """Finds the last entry that fits, best first, among the few in the bracket.

    Their indices are listed after their bitmap in `words`, ascending, so that entries of equal
    score can be distinguished. The cumulative count gives the last entry that fits.

    Returns:
        Its score; the index after it, which ends the ties that are kept; whether both are known.
        They are unknown if there are more entries than slots, or if none fits and none is above, so
        that `hi` is still the `highest`. If none fits but some are above, those are kept.
    """
    hi = bracket.hi
    ids = words + plan.words
    tl.store(words + word_index(plan), pack((row.x >= bracket.lo) & (row.x < hi), plan))
    tl.debug_barrier()
    number = list_entries(words, 0, row.length, row.length * 0, words, ids, plan.slots, -1, plan)
    tl.debug_barrier()
    slot = tl.arange(0, plan.slots)
    listed = slot < number
    entry = tl.load(ids + slot, mask=listed, other=0).to(tl.int32)
    score = tl.load(row.scores + entry, mask=listed, other=NOTHING).to(tl.float32)
    size = tl.load(row.sizes + entry, mask=listed, other=0).to(tl.float32)
    # all pairs: the count of an entry and those that precede it
    ahead = score[:, None] > score[None, :]
    ahead |= (score[:, None] == score[None, :]) & (slot[:, None] <= slot[None, :])
    taken = bracket.at_hi + tl.sum(tl.where(ahead, size[:, None], 0.0), 0)
    fits = listed & (taken <= budget)
    last = tl.min(tl.where(fits, score, hi), 0)
    end = tl.max(tl.where(fits & (score == last), entry + 1, 0), 0)
    known = (number <= plan.slots) & ((end > 0) | (hi < highest))
    tl.debug_barrier()
    return last, tl.where(end > 0, end, row.length), known


@triton.jit
def draw(row, lo, hi, met, plan: tl.constexpr):
    """Writes the keys of a tile's entries from lo to below hi that fit into its slots.

    Unused slots get a lower key. Returns the number of meetings.
    """
    lowest = key(lo)
    slots, slot = row.room, tl.arange(0, plan.slots)
    if plan.parts > 1:
        slots += tl.program_id(0) % plan.parts * plan.slots
    tl.store(slots + slot, (slot * 0 + lowest - 1).to(tl.uint32, bitcast=True))
    tl.debug_barrier()
    # a thread's largest key, and the next three below it
    bits, sign = row.x.to(tl.int32, bitcast=True), tl.where(lo < 0, -1, 1)
    a = next_key(bits, sign, tl.arange(0, plan.threads) * 0 + key(hi), lowest)
    b = next_key(bits, sign, a, lowest)
    c = next_key(bits, sign, b, lowest)
    d = next_key(bits, sign, c, lowest)
    number = (a >= lowest).to(tl.int32) + (b >= lowest).to(tl.int32) + (c >= lowest).to(tl.int32)
    number += (d >= lowest).to(tl.int32)
    at = tl.cumsum(number, 0) - number
    put(slots, at, a, lowest, plan)
    put(slots, at + 1, b, lowest, plan)
    put(slots, at + 2, c, lowest, plan)
    put(slots, at + 3, d, lowest, plan)
    tl.debug_barrier()
    if plan.parts > 1:
        meet(row.share.arrived, met, plan.parts)
        met += 1
    return met


@triton.jit
def put(slots, at, found, lowest, plan: tl.constexpr):
    """Writes the threads' keys that are at least `lowest` and have a slot."""
    fits = (found >= lowest) & (at < plan.slots)
    tl.store(slots + at, found.to(tl.uint32, bitcast=True), mask=fits)


@triton.jit
def weigh_few(slots, wanted, bracket, plan: tl.constexpr):
    """Returns the largest drawn threshold that keeps the wanted amount, and the bracket.

    If all entries were drawn, the bracket is closed around the threshold.
    """
    lo, hi, at_lo, at_hi = bracket
    # entries drawn by other SMs are not in this one's cache
    CACHE: tl.constexpr = ".cg" if plan.parts > 1 else ""
    slot = tl.arange(0, plan.slots * plan.parts)
    mine = tl.load(slots + slot, cache_modifier=CACHE).to(tl.int32, bitcast=True)
    other = tl.load(slots + slot, cache_modifier=CACHE).to(tl.int32, bitcast=True)[None, :]
    lowest, missing = key(lo), at_lo - at_hi
    # all pairs of slots: the amount drawn that is at least as large as each
    each = from_key(other) if plan.mass else 1.0
    sums = tl.sum(tl.where((other >= mine[:, None]) & (other >= lowest), each, 0.0), 1)
    drawn = mine >= lowest
    enough = drawn & (at_hi + sums >= wanted)
    t, kept, above, between = tl.reduce(
        (
            tl.where(enough, mine, lowest),
            tl.where(enough, sums, missing),
            tl.where(drawn & ~enough, sums, 0.0),
            sums,
        ),
        0,
        around,
    )
    tl.debug_barrier()
    t = from_key(t)
    # sums agree to less than half of the lightest entry: none was missed
    if tl.abs(missing - between) < 0.5 * (lo if plan.mass else 1.0):
        lo, at_lo, hi, at_hi = t, at_hi + kept, from_key(key(t) + 1), at_hi + above
    return t, Bracket(lo, hi, at_lo, at_hi)


@triton.jit
def around(t, kept, above, between, other_t, other_kept, other_above, other_between):
    """Combines four values of two slots: by maximum, minimum, maximum and maximum.

    They are the largest threshold that keeps enough, the least sum that is enough, the largest that
    is not, and the largest of all.
    """
    return (
        tl.maximum(t, other_t),
        tl.minimum(kept, other_kept),
        tl.maximum(above, other_above),
        tl.maximum(between, other_between),
    )
