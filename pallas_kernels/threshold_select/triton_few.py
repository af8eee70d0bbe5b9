"""Ends a search by drawing the few entries between two thresholds out of a resident row.

They are compared by their bits, whose order is that of the numbers on one side of 0. Some cannot be
drawn: those on the other side of 0, repeated values in a thread, and a thread's fifth and later
ones. Their sum is then missed, and the search goes on. Under a budget what ends a search is
triton_last.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_tiles import from_key, key


@triton.jit
def draw(
    x,  # [T, R, 4]
    lo,
    hi,
    slots,  # [plan.slots]
    plan: tl.constexpr,
):
    """Write the keys of the entries from lo to below hi, as many as fit into the slots.

    Slots that are left over hold a lower key.
    """
    least = key(lo)
    slot = tl.arange(0, plan.slots)
    tl.store(slots + slot, (slot * 0 + least - 1).to(tl.uint32, bitcast=True))
    tl.debug_barrier()
    # a thread's largest key, and the next three below it
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
def next_key(
    bits,  # [T, R, 4]
    sign,
    below,  # [T]
    least,
):
    """Return each thread's largest key from `least` to under `below`, or a lower one.

    Keys are bits, or 2^31 - 1 - bits where numbers are below 0. With `below` subtracted, keys under
    it are the largest as unsigned integers.
    """
    distance = multiply_add(bits, sign, (tl.where(sign < 0, 0x7FFFFFFF, 0) - below)[:, None, None])
    found = (
        tl.max(tl.max(distance.to(tl.uint32, bitcast=True), 2), 1).to(tl.int32, bitcast=True)
        + below
    )
    return tl.where((found >= least) & (found < below), found, least - 1)


@triton.jit
def multiply_add(x, factor, term):
    """Compute x · factor + term on integers in one instruction.

    It is computed again at each use, since x · factor would take registers.
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
def put(
    slots,  # [plan.slots]
    at,  # [T]
    found,  # [T]
    least,
    plan: tl.constexpr,
):
    """Write the keys that are at least `least` and have a slot."""
    fits = (found >= least) & (at < plan.slots)
    tl.store(slots + at, found.to(tl.uint32, bitcast=True), mask=fits)


@triton.jit
def weigh_few(
    slots,  # [plan.slots]
    wanted,
    lo,
    at_lo,
    hi,
    at_hi,
    plan: tl.constexpr,
):
    """Return the largest drawn threshold that keeps what is wanted, and the bracket.

    If all entries were drawn, the bracket is closed around the threshold.
    """
    slot = tl.arange(0, plan.slots)
    mine = tl.load(slots + slot).to(tl.int32, bitcast=True)
    other = tl.load(slots + slot).to(tl.int32, bitcast=True)[None, :]
    least, missing = key(lo), at_lo - at_hi
    # all pairs of slots: how much of what was drawn is at least as large as each
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
    # sums agree to less than half of the lightest entry: none was missed
    if tl.abs(missing - between) < 0.5 * (lo if plan.mass else 1.0):
        lo, at_lo, hi, at_hi = t, at_hi + kept, from_key(key(t) + 1), at_hi + above
    return t, lo, at_lo, hi, at_hi


@triton.jit
def around(t, kept, above, between, other_t, other_kept, other_above, other_between):
    """Combine four values of two slots: by maximum, minimum, maximum and maximum.

    They are the largest threshold that keeps enough, the least sum that is enough, the largest that
    is not, and the largest of all.
    """
    return (
        tl.maximum(t, other_t),
        tl.minimum(kept, other_kept),
        tl.maximum(above, other_above),
        tl.maximum(between, other_between),
    )
