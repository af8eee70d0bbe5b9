"""Implements `api.shared_counts` with jax-triton, one program per row of the batch.

A program keeps the row's scores in registers. It searches for a threshold that the budgeted number
of scores reaches, with each list's number clamped to its floor and its cap. A pass counts three
trial thresholds at once, since the reductions after counting take as long as counting itself. One
trial is interpolated from the counts at both ends of the remaining interval, and two are placed
around it: 8 or 9 passes suffice for most scores. After a poor guess, the next pass cuts the
interval into four. After a pass that separates nothing, the ends move to existing scores, so that
equal scores end the search. Thresholds are integers with the order of the floats.
"""

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jsparse.shapes import Lengths, Rows

MIN_WARPS = 8
VECTOR = 4  # scores per load
GUESS, QUARTERS, ENDS = (tl.constexpr(way) for way in range(3))  # placement of the trials
# The two trials around a guess among n candidates are this many standard deviations of its rank
# away.
SPREAD = tl.constexpr(1.5)
INF = tl.constexpr(float("inf"))
# `order` of the lowest finite float and of infinity
LOWEST, LARGEST = tl.constexpr(-0x7F800000), tl.constexpr(0x7F800000)
# bits per count when three counts share an integer of 64 bits
FIELD = tl.constexpr(21)
MASK = tl.constexpr((1 << 21) - 1)


def shared_counts(
    scores: Float[Array, "B K S"], total: Rows, *, min_count: int, max_count: int
) -> Lengths:
    """Implements `api.shared_counts` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, lists, slots = scores.shape
    padded = triton.next_power_of_2(lists)
    warps = max(MIN_WARPS, padded)
    width = 32 * VECTOR * warps // padded
    chunks = triton.cdiv(slots, width)
    head = 1 << (chunks.bit_length() - 1)
    return triton_call(
        scores,
        total,
        kernel=counts_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, lists), total.dtype),
        grid=(batch,),
        num_warps=warps,
        K=lists,
        S=slots,
        MIN_COUNT=min(min_count, slots),
        MAX_COUNT=min(max_count, slots),
        LISTS=padded,
        WIDTH=width,
        HEAD=head,
        TAIL=triton.next_power_of_2(chunks - head) if chunks > head else 0,
        EACH=VECTOR,
    )


@triton.jit
def load_scores(
    scores_ptr,  # [B, K, S]
    first,  # the first slot
    K: tl.constexpr,
    S: tl.constexpr,
    LISTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Returns the scores of CHUNKS · WIDTH slots, [LISTS, CHUNKS, WIDTH]; -inf where none counts.

    A warp belongs to one list if there are enough warps; chunks are in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, LISTS)[:, None, None]
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    slot = first + chunk * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    x = tl.load(
        scores_ptr + (row * K + nth) * S + slot, mask=(nth < K) & (slot < S), other=-INF
    ).to(tl.float32)
    return tl.where(x == x, x, -INF)


@triton.jit
def order(x):
    """Returns a 64-bit integer with the order of the float; 0 and -0 give the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def from_order(key):
    """Returns the float of an integer from `order`."""
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def by_thread(
    x,  # [LISTS, CHUNKS, WIDTH]
    bound,
    EACH: tl.constexpr,
):
    """Returns the number of scores in each thread's share that reach `bound`, a float.

    Counting in floats is faster than in integers, since one unit compares and another adds.
    """
    by_column = tl.sum(tl.where(x >= bound, 1.0, 0.0), 1)
    columns: tl.constexpr = [x.shape[0], x.shape[2] // EACH, EACH]
    return tl.sum(tl.reshape(by_column, columns), 2)


@triton.jit
def by_list(
    head,  # [LISTS, HEAD, WIDTH]
    tail,  # [LISTS, TAIL, WIDTH]
    a,
    b,
    c,
    HAS_TAIL: tl.constexpr,
    EACH: tl.constexpr,
):
    """Returns the number of scores of each list that reach each of three thresholds, [LISTS]."""
    a, b, c = from_order(a), from_order(b), from_order(c)
    in_a, in_b, in_c = by_thread(head, a, EACH), by_thread(head, b, EACH), by_thread(head, c, EACH)
    if HAS_TAIL:
        in_a += by_thread(tail, a, EACH)
        in_b += by_thread(tail, b, EACH)
        in_c += by_thread(tail, c, EACH)
    # a thread counts less than 256, so the 24 bits of a float fit three counts
    packed = (in_a + in_b * 256.0 + in_c * 65536.0).to(tl.int32)
    # a list counts less than 32768, so one sum of 32 bits serves two thresholds
    pair = tl.sum((packed & 255) | ((packed >> 8) & 255) << 16, 1)
    return pair & 0xFFFF, pair >> 16, tl.sum(packed >> 16, 1)


@triton.jit
def over_lists(a, b, c):
    """Returns the sums of three counts over all lists, by one reduction."""
    packed = a.to(tl.int64) | b.to(tl.int64) << FIELD | c.to(tl.int64) << 2 * FIELD
    packed = tl.sum(packed, 0)
    a, b = packed & MASK, packed >> FIELD & MASK
    return a.to(tl.int32), b.to(tl.int32), (packed >> 2 * FIELD).to(tl.int32)


@triton.jit
def narrow(lo, in_lo, n_lo, hi, in_hi, n_hi, trial, inside, n, total):
    """Moves an end of the interval to a trial inside it; trials must be in ascending order."""
    enough = n >= total
    first = (not enough) & (trial < hi)
    return (
        tl.where(enough, trial, lo),
        tl.where(enough, inside, in_lo),
        tl.where(enough, n, n_lo),
        tl.where(first, trial, hi),
        tl.where(first, inside, in_hi),
        tl.where(first, n, n_hi),
    )


@triton.jit
def place_trials(lo, hi, n_lo, n_hi, total, way):
    """Returns three thresholds between lo and hi, ascending."""
    width = (hi - lo).to(tl.float32)
    candidates = (n_lo - n_hi).to(tl.float32)
    middle = (n_lo - total).to(tl.float32) / candidates
    apart = SPREAD * tl.sqrt(middle * (1 - middle) / candidates)
    middle = tl.where(way == GUESS, middle, 0.5)
    apart = tl.where(way == GUESS, apart, tl.where(way == QUARTERS, 0.25, 1.0))
    below, above = tl.maximum(middle - apart, 0.0), tl.minimum(middle + apart, 1.0)
    a = lo + (below * width).to(tl.int64)
    b = lo + (middle * width).to(tl.int64)
    c = lo + (above * width).to(tl.int64)
    first, last = lo + 1, hi - 1
    return (
        tl.minimum(tl.maximum(a, first), last),
        tl.minimum(tl.maximum(b, first), last),
        tl.minimum(tl.maximum(c, first), last),
    )


@triton.jit
def extremes(
    x,  # [LISTS, CHUNKS, WIDTH]
    lo,
    hi,
):
    """Returns each column's lowest score from lo on and its highest score below hi."""
    lowest = tl.min(tl.where(x >= lo, x, INF), 1)
    return lowest, tl.max(tl.where(x >= hi, -INF, x), 1)


@triton.jit
def tighten(
    head,  # [LISTS, HEAD, WIDTH]
    tail,  # [LISTS, TAIL, WIDTH]
    lo,
    hi,
    HAS_TAIL: tl.constexpr,
):
    """Returns the interval of the scores from lo on and below hi."""
    lo, hi = from_order(lo), from_order(hi)
    lowest, largest = extremes(head, lo, hi)
    if HAS_TAIL:
        others = extremes(tail, lo, hi)
        lowest, largest = tl.minimum(lowest, others[0]), tl.maximum(largest, others[1])
    lowest, largest = tl.min(lowest, 1), tl.max(largest, 1)
    return order(tl.min(lowest, 0)), order(tl.max(largest, 0)) + 1


@triton.jit
def counts_kernel(
    scores_ptr,  # [B, K, S]
    total_ptr,  # [B]
    out_ptr,  # [B, K]
    K: tl.constexpr,
    S: tl.constexpr,
    MIN_COUNT: tl.constexpr,
    MAX_COUNT: tl.constexpr,
    LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    EACH: tl.constexpr,
):
    """Divides one row's best scores among its lists."""
    HAS_TAIL: tl.constexpr = TAIL > 0
    row = tl.program_id(0)
    total = tl.load(total_ptr + row)
    head = load_scores(scores_ptr, 0, K, S, LISTS, HEAD, WIDTH)
    tail = head  # unused without a tail
    if HAS_TAIL:
        tail = load_scores(scores_ptr, HEAD * WIDTH, K, S, LISTS, TAIL, WIDTH)

    # -inf does not reach the lowest finite threshold; the threshold after infinity is NaN, which no
    # score reaches
    lo, hi = tl.full([], LOWEST, tl.int64), tl.full([], LARGEST + 1, tl.int64)
    finite, _, _ = by_list(head, tail, lo, lo, lo, HAS_TAIL, EACH)
    floor, cap = tl.minimum(finite, MIN_COUNT), tl.minimum(finite, MAX_COUNT)
    lo, hi = tighten(head, tail, lo, hi, HAS_TAIL)
    in_lo, in_hi = cap, floor
    n_lo, n_hi, _ = over_lists(in_lo, in_hi, in_hi)
    way = tl.full([], GUESS, tl.int32)

    # with floors and caps, more than `total` scores reach lo and fewer reach hi; an end reached by
    # exactly `total` scores is the threshold
    while (hi - lo > 1) & (n_lo > total) & (n_hi < total):
        a, b, c = place_trials(lo, hi, n_lo, n_hi, total, way)
        in_a, in_b, in_c = by_list(head, tail, a, b, c, HAS_TAIL, EACH)
        in_a = tl.minimum(tl.maximum(in_a, floor), cap)
        in_b = tl.minimum(tl.maximum(in_b, floor), cap)
        in_c = tl.minimum(tl.maximum(in_c, floor), cap)
        n_a, n_b, n_c = over_lists(in_a, in_b, in_c)
        width, candidates = hi - lo, n_lo - n_hi
        lo, in_lo, n_lo, hi, in_hi, n_hi = narrow(
            lo, in_lo, n_lo, hi, in_hi, n_hi, a, in_a, n_a, total
        )
        lo, in_lo, n_lo, hi, in_hi, n_hi = narrow(
            lo, in_lo, n_lo, hi, in_hi, n_hi, b, in_b, n_b, total
        )
        lo, in_lo, n_lo, hi, in_hi, n_hi = narrow(
            lo, in_lo, n_lo, hi, in_hi, n_hi, c, in_c, n_c, total
        )
        poor = ((hi - lo) * 4 > width) & ((n_lo - n_hi) * 4 > candidates)
        stuck = (n_lo - n_hi == candidates) & (way != ENDS)
        way = tl.where(poor & (way != QUARTERS), QUARTERS, GUESS)
        if stuck:
            lo, hi = tighten(head, tail, lo, hi, HAS_TAIL)
            way = tl.full([], ENDS, tl.int32)

    # all scores from lo on and below hi are equal now, or none or all of them are wanted
    more = in_lo - in_hi
    missing = tl.maximum(total - n_hi, 0)
    more = tl.maximum(tl.minimum(missing - (tl.cumsum(more, 0) - more), more), 0)
    nth = tl.arange(0, LISTS)
    tl.store(out_ptr + row * K + nth, in_hi + more, mask=nth < K)
