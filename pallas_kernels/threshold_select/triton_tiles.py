"""Reads tiles of a row of scores, and sums over them inside a thread.

A tile is [T, R, 4]: T threads hold R runs of four neighbours each, so that loads are coalesced and
sums over the last two axes need no other thread. A row that fits one tile is read once and stays in
registers; a longer one is read again by every pass, mostly from L2.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
LEAST_LOG = tl.constexpr(-126.0)  # of 2^-126, the least weight: it is below what can be chosen


@dataclass(frozen=True)
class SearchedRow:
    """Holds the static parameters of a row and its search.

    Attributes:
        rule: "top_k", "top_p", "threshold" or "budget".
        value: the rule's number; None where every head has its own.
        softmax: whether its entries are logits. If not, they are weights, or scores that are only
            compared.
        normalised: whether the exponentials of its logits are the weights, whatever their sum.
        size: number of its entries, and the distance between rows.
        threads, runs: T and R of a tile.
        few: number of entries that may be drawn to end a search; 0 draws none.
    """

    rule: str
    value: float | None
    softmax: bool
    normalised: bool
    size: int
    threads: int
    runs: int
    few: int

    @property
    def tile(self) -> int:
        """Return the number of entries per tile."""
        return 4 * self.threads * self.runs

    @property
    def resident(self) -> bool:
        """Return whether the row stays in registers."""
        return self.size <= self.tile

    @property
    def words(self) -> int:
        """Return the number of 32-bit words of its bitmap, which covers whole tiles."""
        return -(-self.size // self.tile) * self.tile // 32

    @property
    def words_each(self) -> int:
        """Return the number of words of a bitmap that a thread lists at a time."""
        return max(self.runs // 8, 1)

    @property
    def slots(self) -> int:
        """Return the number of entries that may be drawn or listed, into unused bitmaps."""
        words = self.words if self.sized else 2 * self.words  # a list needs a bitmap itself
        return min(self.few, self.threads // 4, words) if self.resident else 0

    @property
    def mass(self) -> bool:
        """Return whether the row is searched by its weights rather than its scores."""
        return self.rule == "top_p"

    @property
    def sized(self) -> bool:
        """Return whether entries count as their sizes rather than as one each."""
        return self.rule == "budget"


@triton.jit
def read(
    row,  # [plan.size]
    start,
    length,
    plan: tl.constexpr,
    PAST: tl.constexpr = NOTHING,
):
    """Load a tile of scores [T, R, 4], with -inf, or what `PAST` says, past the length.

    Whole runs are loaded, so that loads stay 16 bytes wide.
    """
    run = first_of_runs(plan)
    entry = run + tl.arange(0, 4)[None, None, :]
    inside = tl.broadcast_to(start + run < length, [plan.threads, plan.runs, 4])
    if plan.size % 4:  # the last run goes past the row
        inside &= start + entry < plan.size
    scores = tl.load(row + start + entry, mask=inside, other=PAST).to(tl.float32)
    return tl.where(start + entry < length, scores, PAST)


@triton.jit
def first_of_runs(plan: tl.constexpr):
    """Return where in a tile each thread's runs begin, [T, R, 1]."""
    T: tl.constexpr = plan.threads
    return (tl.arange(0, plan.runs)[None, :, None] * T + tl.arange(0, T)[:, None, None]) * 4


@triton.jit
def weigh(scores, top, plan: tl.constexpr):
    """Return weights and their logarithms to base 2.

    Weights are relative to the row's largest where scores are logits. The weight of -inf and of NaN
    (of a number and NaN the maximum is the number) is too small to be chosen or to count.
    """
    if plan.softmax:
        logs = tl.maximum((scores - top) * LOG2_E, LEAST_LOG)
        return exp2(logs), logs
    weights = tl.maximum(scores, 0.0)
    return weights, tl.maximum(log2(weights), LEAST_LOG)


@triton.jit
def to_entries(scores, top, plan: tl.constexpr):
    """Return what a row is searched by: its weights, or its scores."""
    if plan.mass:
        return weigh(scores, top, plan)[0]
    return scores


@triton.jit
def counted(
    x,
    sizes,  # [plan.size]
    start,
    length,
    plan: tl.constexpr,
):
    """Return what each entry of a tile adds to a sum: its weight, its size, or 1."""
    if plan.mass:
        return x
    elif plan.sized:
        return read(sizes, start, length, plan, 0)
    else:
        return 1.0


@triton.jit
def moments(scores, sizes, start, length, top, plan: tl.constexpr):
    """Return what a row is searched by, what entries count, and each thread's total and moments.

    The first two moments are of the logarithms by weight, or of the scores by number or size.
    """
    if plan.mass:
        weights, logs = weigh(scores, top, plan)
        by_log = weights * logs
        return weights, weights, in_thread(weights), in_thread(by_log), in_thread(by_log * logs)
    finite = scores > NOTHING
    known = tl.where(finite, scores, 0.0)
    each = counted(scores, sizes, start, length, plan)
    number, first = finite.to(tl.float32) * each, known * each
    return scores, each, in_thread(number), in_thread(first), in_thread(first * known)


@triton.jit
def above(x, each, t):
    """Sum by thread what the entries of a tile that are at least t count."""
    return in_thread(at_least(x, t) * each)


@triton.jit
def highest_below(x, each, hi, plan: tl.constexpr):
    """Return each thread's largest entry below hi that counts anything."""
    below = x < hi
    if plan.sized:
        below &= each > 0
    return thread_top(tl.where(below, x, NOTHING))


@triton.jit
def at_least(x, t):
    """Return 1.0 where x ≥ t, else 0.0, in one instruction."""
    return tl.inline_asm_elementwise(
        "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, t], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def in_thread(x):
    """Sum a tile by thread, to [T]."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def thread_top(scores):
    """Return each thread's largest score."""
    return tl.max(tl.max(scores, 2), 1)


@triton.jit
def thread_low(scores):
    """Return each thread's smallest score that can be chosen."""
    return tl.min(tl.min(tl.where(scores > NOTHING, scores, -NOTHING), 2), 1)


@triton.jit
def add_pairs(a, b, c, d):
    """Combine two sums."""
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Combine three sums."""
    return a + d, b + e, c + f


@triton.jit
def extremes(low, top, other_low, other_top):
    """Combine a minimum and a maximum."""
    return tl.minimum(low, other_low), tl.maximum(top, other_top)


@triton.jit
def key(x):
    """Return the bits of a float as an integer of the same order."""
    # floats are sign and magnitude, so those below 0 have their other bits turned over
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(k):
    """Return the float of a key, the inverse of `key`."""
    return (k ^ ((k >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp2(x):
    """Return 2 to the power of x, 0 below 2^-126."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log2(x):
    """Return the logarithm to base 2; subnormals count as 0."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
