"""The end of a search: the few entries between two thresholds, drawn out of a row that stays in
registers.

They are compared by their bits, whose order is that of the numbers on one side of 0. Some cannot be
drawn: those on the other side of 0, equal ones of a thread, more than four of it. Their sum is then
missed, and the search goes on.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_tiles import from_key, key


@triton.jit
def draw(x, lo, hi, slots, plan: tl.constexpr):
    """Writes the keys of the entries from lo to below hi, as many as there are slots, and behind
    them a lower one.
    """
    least = key(lo)
    slot = tl.arange(0, plan.slots)
    tl.store(slots + slot, (slot * 0 + least - 1).to(tl.uint32, bitcast=True))
    tl.debug_barrier()
    bits, sign = x.to(tl.int32, bitcast=True), tl.where(lo < 0, -1, 1)
    a = next_key(bits, sign, tl.arange(0, plan.threads) * 0 + key(hi), least)
    b = next_key(bits, sign, a, least)
    c = next_key(bits, sign, b, least)
    d = next_key(bits, sign, c, least)
    number = (a >= least).to(tl.int32) + (b >= least).to(tl.int32) + (c >= least).to(tl.int32)
    number += (d >= least).to(tl.int32)
    at = tl.cumsum(number, 0) - number
    put(slots, at, a, least, plan)
    put(slots, at + 1, b, least, plan)
    put(slots, at + 2, c, least, plan)
    put(slots, at + 3, d, least, plan)
    tl.debug_barrier()


@triton.jit
def next_key(bits, sign, below, least):
    """By thread: the largest key from `least` to under `below`, or a lower one. Keys are bits, or
    2^31 - 1 - bits where numbers are below 0; less `below`, unsigned, those under it are the
    largest.
    """
    distance = multiply_add(bits, sign, (tl.where(sign < 0, 0x7FFFFFFF, 0) - below)[:, None, None])
    found = (
        tl.max(tl.max(distance.to(tl.uint32, bitcast=True), 2), 1).to(tl.int32, bitcast=True)
        + below
    )
    return tl.where((found >= least) & (found < below), found, least - 1)


@triton.jit
def multiply_add(x, factor, term):
    """Integers x · factor + term in one instruction, made anew at each use, since x · factor would
    take registers.
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
def put(slots, at, found, least, plan: tl.constexpr):
    """Writes what was found."""
    tl.store(
        slots + at, found.to(tl.uint32, bitcast=True), mask=(found >= least) & (at < plan.slots)
    )


@triton.jit
def weigh_few(slots, wanted, lo, at_lo, hi, at_hi, plan: tl.constexpr):
    """The largest drawn threshold that keeps what is wanted; and the bracket, closed around it if
    all were drawn.
    """
    slot = tl.arange(0, plan.slots)
    mine = tl.load(slots + slot).to(tl.int32, bitcast=True)
    other = tl.load(slots + slot).to(tl.int32, bitcast=True)[None, :]
    least, missing = key(lo), at_lo - at_hi
    each = from_key(other) if plan.mass else 1.0
    sums = tl.sum(tl.where((other >= mine[:, None]) & (other >= least), each, 0.0), 1)
    drawn = mine >= least
    enough = drawn & (at_hi + sums >= wanted)
    t, kept, above, between = tl.reduce(
        (
            tl.where(enough, mine, least),
            tl.where(enough, sums, missing),
            tl.where(drawn & ~enough, sums, 0.0),
            sums,
        ),
        0,
        around,
    )
    tl.debug_barrier()
    t = from_key(t)
    if tl.abs(missing - between) < 0.5 * (lo if plan.mass else 1.0):
        lo, at_lo, hi, at_hi = t, at_hi + kept, from_key(key(t) + 1), at_hi + above
    return t, lo, at_lo, hi, at_hi


@triton.jit
def around(t, kept, above, between, other_t, other_kept, other_above, other_between):
    """Combines the largest threshold that keeps enough, the least that is enough, the most that is
    not, the most.
    """
    return (
        tl.maximum(t, other_t),
        tl.minimum(kept, other_kept),
        tl.maximum(above, other_above),
        tl.maximum(between, other_between),
    )
