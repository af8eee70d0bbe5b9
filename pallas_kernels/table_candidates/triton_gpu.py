"""Implements the rule Best of `api.table_candidates` with jax-triton, in one launch.

Scores are not negative, so their bits have the same order. Every head has P programs, each with its
own part of the slots and four steps:

1. It counts a sample of its scores by their upper eight bits.
2. From all programs' counts it derives a floor that enough scores probably reach. If far too many
   would, the sample is also counted by the lower bits, for a higher floor. The few slots that reach
   the floor are gathered in order.
3. The few are counted, score by score for almost two octaves above the floor, and by octaves above
   that. If the threshold is among the octaves, they are counted again from its octave on. If all
   programs' few are too few, everything is repeated with all scores instead of a sample.
4. With the threshold known, it lists its few above it, and the required number of those equal to
   it. The counts of earlier parts give its start in the list.

The programs of a head synchronise after each count (triton_meeting.py).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, BFloat16

from jsparse.pallas_kernels.table_candidates.rules import Best
from jsparse.pallas_kernels.triton_meeting import max_programs, meet
from jsparse.selection import Selection
from jsparse.shapes import Lengths

PROGRAMS = 256  # of all heads, if that many can run at once
SMALLEST = 1024  # minimum slots per part, on average
MAX_PART = 1 << 17  # maximum slots per part, numbered by FIELD bits
TILE = 4096  # slots per load
FEW = 2048  # gathered slots per load
SAMPLE = 1024  # sampled slots per load
NUM_WARPS = 8
RAREST = tl.constexpr(16)  # in long rows, one slot of this many is sampled
SAMPLED = tl.constexpr(8)  # adjacent slots of a sample
UPPER = tl.constexpr(1 << 8)  # bins of the upper 8 of a score's 15 bits
LOW = tl.constexpr(7)  # number of its other bits
LOWER = tl.constexpr(1 << 7)  # bins of these
BINS = tl.constexpr(1 << 8)  # bins that count the few: one per thread of a block
SINGLE = tl.constexpr(224)  # bins of single scores among these; the others are octaves
CROWD = tl.constexpr(3)  # more than this times the required slots are too many to gather
SLACK = tl.constexpr(8.0)  # margin of a sampled count, in square roots of it
GRAIN = tl.constexpr(64)  # parts start at multiples of it
# an integer of the few has a slot, relative to its part's first, with the score above it
FIELD = tl.constexpr(17)
MASK = tl.constexpr((1 << 17) - 1)
KEYS = tl.constexpr((1 << 15) - 1)
HALF = tl.constexpr(16)  # two numbers of slots share an integer, split here
HALF_MASK = tl.constexpr((1 << 16) - 1)


def table_candidates(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    lengths: Lengths,
    rule: Best,
    *,
    capacity: int,
    sink: int,
) -> Selection:
    """Implements `api.table_candidates` under the rule Best with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    slots, pairs = vertical.shape[2], lengths.size
    parts = number_of_parts(pairs, slots)
    tile = min(max(triton.next_power_of_2(triton.cdiv(slots, parts)), SMALLEST), TILE)
    outputs = (
        jax.ShapeDtypeStruct((*lengths.shape, capacity), jnp.int32),
        jax.ShapeDtypeStruct(lengths.shape, jnp.int32),
        # from here on, scratch memory of the kernel
        jax.ShapeDtypeStruct((pairs, slots), jnp.int32),
        jax.ShapeDtypeStruct((pairs, parts, UPPER.value), jnp.int32),
        jax.ShapeDtypeStruct((pairs, 2, parts, BINS.value), jnp.int32),
        jax.ShapeDtypeStruct((pairs, parts, LOWER.value), jnp.int32),
        jax.ShapeDtypeStruct((pairs,), jnp.int32),
    )
    ids, count, *_ = triton_call(
        jax.lax.bitcast_convert_type(vertical, jnp.int16),
        jax.lax.bitcast_convert_type(distance, jnp.int16),
        lengths,
        rule.number,
        kernel=candidates_kernel,
        out_shape=outputs,
        grid=(pairs * parts,),
        num_warps=NUM_WARPS,
        zeroed_outputs=(len(outputs) - 1,) if parts > 1 else (),
        SLOTS=slots,
        ALIGNED=math.gcd(slots, 16),
        SINK=sink,
        CAPACITY=capacity,
        PARTS=parts,
        TILE=tile,
        FEW=min(max(triton.next_power_of_2(2 * capacity // parts), SMALLEST), FEW),
        SAMPLE=SAMPLE,
    )
    return Selection(ids, count, granularity="token")


def number_of_parts(pairs: int, slots: int) -> int:
    """Returns the number of programs per head, a power of two."""
    wanted = min(PROGRAMS // pairs, slots // SMALLEST, max_programs())
    lowest = triton.next_power_of_2(triton.cdiv(slots, MAX_PART))
    return max(1 << max(wanted.bit_length() - 1, 0), lowest)


class Part(NamedTuple):
    """A program's part of a head's slots."""

    vertical: Any  # [SLOTS], of the head
    distance: Any  # at the newest slot's distance, 0
    few: Any  # destination of its gathered slots
    begin: Any
    end: Any  # end of its slots that have a token
    room: Any  # end of the slots that it may read
    newest: Any  # newest slot of the head


@triton.jit
def candidates_kernel(
    vertical_ptr,  # [pairs, SLOTS], the bits of bfloat16
    distance_ptr,  # [pairs, SLOTS], likewise
    lengths_ptr,  # [pairs]
    number_ptr,  # [pairs]
    ids_ptr,  # [pairs, CAPACITY]
    count_ptr,  # [pairs]
    few_ptr,  # [pairs, SLOTS], each part's from its first slot on
    upper_ptr,  # [pairs, PARTS, UPPER], of a sample
    few_counts_ptr,  # [pairs, 2, PARTS, BINS], of the few
    lower_ptr,  # [pairs, PARTS, LOWER], of a sample
    arrived_ptr,  # [pairs], zeros if there are several parts
    SLOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SINK: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Lists the best slots of one part of a head, as program head · PARTS + part."""
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    length = tl.load(lengths_ptr + pair)
    newest = length - 1
    always = tl.minimum(tl.maximum(newest, 0), SINK)
    number = tl.minimum(tl.maximum(tl.load(number_ptr + pair), 1), CAPACITY)
    count = tl.minimum(number, length)
    wanted = tl.maximum(count - always - 1, 0)  # number of ranked slots to list
    sinks = tl.minimum(always, count)

    # multiples of powers of two, known to the compiler, which then loads several slots at once
    whole = tl.cdiv(length, ALIGNED) * ALIGNED
    size = tl.cdiv(whole, PARTS * GRAIN) * GRAIN
    begin = part * size
    end = tl.minimum(begin + size, length)
    row = pair.to(tl.int64) * SLOTS
    few_ptr += row + begin
    room = tl.minimum(begin + size, whole)
    own = Part(vertical_ptr + row, distance_ptr + row + newest, few_ptr, begin, end, room, newest)
    ids_ptr += pair.to(tl.int64) * CAPACITY
    upper_ptr += pair * PARTS * UPPER
    few_counts_ptr += pair * 2 * PARTS * BINS
    lower_ptr += pair * PARTS * LOWER

    every = tl.minimum(tl.maximum(size // SAMPLE, 1), RAREST)
    bins = tl.arange(0, BINS)
    meetings, few, floor, bin, above = 0, 0, 0, 0, 0
    counts, earlier = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    enough = True
    searching = True
    while searching:
        upper = _sample(own, every, 0, False, SINK, SAMPLE)
        tl.store(upper_ptr + part * UPPER + tl.arange(0, UPPER), upper)
        meetings = meet(arrived_ptr + pair, meetings, PARTS)

        upper = _counts(upper_ptr, 0, PARTS, UPPER)[0]
        all_counted = tl.sum(upper, 0).to(tl.int64)
        best = tl.cdiv(wanted * all_counted, tl.maximum(newest - always, 1)).to(tl.int32)
        if every > 1:
            best += (tl.sqrt(best.to(tl.float32)) * SLACK).to(tl.int32)
        bin, above = _end(upper, best)
        floor = bin << LOW
        if tl.sum(tl.where(tl.arange(0, UPPER) >= bin, upper, 0), 0) > CROWD * best:
            lower = _sample(own, every, bin, True, SINK, SAMPLE)
            tl.store(lower_ptr + part * LOWER + tl.arange(0, LOWER), lower)
            meetings = meet(arrived_ptr + pair, meetings, PARTS)
            floor += _end(_counts(lower_ptr, 0, PARTS, LOWER)[0], best - above)[0]

        few = _gather(own, floor, SINK, TILE)
        counting = True
        while counting:
            # double-buffered: other programs may still be reading the previous post
            told_ptr = few_counts_ptr + meetings % 2 * PARTS * BINS
            tl.store(told_ptr + part * BINS + bins, _count_few(few_ptr, few, floor, FEW))
            meetings = meet(arrived_ptr + pair, meetings, PARTS)
            counts, earlier = _counts(told_ptr, part, PARTS, BINS)
            bin, above = _end(counts, wanted)
            enough = tl.sum(counts, 0) >= wanted
            counting = enough & (bin >= SINGLE) & (wanted > 0)
            floor += tl.where(counting, SINGLE + ((bin - SINGLE) << LOW), 0)
        searching = (every > 1) & (not enough)
        every = 1

    ties = wanted - above  # this many are listed, the lowest slots first
    ties_before = tl.sum(tl.where(bins == bin, earlier, 0), 0)
    place = sinks + tl.sum(tl.where(bins > bin, earlier, 0), 0)
    lowest = tl.where(wanted > 0, floor + bin, KEYS)
    _list(own, few, lowest, ties, ties_before, ids_ptr + place, FEW)
    for start in range(count + part * FEW, CAPACITY, PARTS * FEW):
        behind = start + tl.arange(0, FEW)
        tl.store(ids_ptr + behind, tl.zeros([FEW], tl.int32), mask=behind < CAPACITY)
    for start in range(part * FEW, sinks, PARTS * FEW):
        slot = start + tl.arange(0, FEW)
        tl.store(ids_ptr + slot, slot, mask=slot < sinks)
    if part == 0:
        # the newest ranks below the sinks, and above all others
        tl.store(ids_ptr + count - 1, newest, mask=count > always)
        tl.store(count_ptr + pair, count)


@triton.jit
def _keys(
    vertical_ptr,  # of the first slot; the next ones follow
    distance_ptr,  # of the first slot; the next ones precede
    nth,
    inside,
    ranked,
):
    """Returns the scores of the ranked slots as integers; all slots of `inside` are readable."""
    vertical = tl.load(vertical_ptr + nth, mask=inside, other=0)
    distance = tl.load(distance_ptr - nth, mask=ranked, other=0)
    return tl.maximum(tl.maximum(vertical, distance), 0).to(tl.int32)


@triton.jit
def _sample(
    own,
    every,
    bin,
    BY_LOWER: tl.constexpr,
    SINK: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Counts one of `every` scores of a part by the upper bits, or those of a bin by the others."""
    nth = tl.arange(0, SAMPLE)
    nth = nth // SAMPLED * SAMPLED * every + nth % SAMPLED
    counts = tl.zeros([LOWER if BY_LOWER else UPPER], tl.int32)
    for start in range(own.begin, own.end, SAMPLE * every):
        slot = start + nth
        ranked = (slot >= SINK) & (slot < own.newest) & (slot < own.end)
        key = _keys(own.vertical + start, own.distance - start, nth, ranked, ranked)
        if BY_LOWER:
            ranked &= key >> LOW == bin
            counts += tl.histogram(key & (LOWER - 1), LOWER, mask=ranked)
        else:
            counts += tl.histogram(key >> LOW, UPPER, mask=ranked)
    return counts


@triton.jit
def _gather(own, floor, SINK: tl.constexpr, TILE: tl.constexpr):
    """Stores the ranked slots that reach the floor, in order; returns their number."""
    few = 0
    for start in range(own.begin, own.end, TILE):
        nth = tl.arange(0, TILE)
        slot = start + nth
        inside = slot < own.room
        ranked = inside & (slot >= SINK) & (slot < own.newest)
        key = _keys(own.vertical + start, own.distance - start, nth, inside, ranked)
        gathered = _rows(ranked & (key >= floor), TILE, 8)
        before, more = _before(gathered.to(tl.int32))
        word = (key << FIELD) | (slot - own.begin)
        tl.store(own.few + few + before, _rows(word, TILE, 8), mask=gathered)
        few += more
    tl.debug_barrier()
    return few


@triton.jit
def _count_few(
    few_ptr,  # [few]
    few,
    floor,
    FEW: tl.constexpr,
):
    """Counts a part's few that reach the floor.

    The first bins count single scores from the floor on, the others octaves above these; the last
    also counts everything above.
    """
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, few, FEW):
        nth = start + tl.arange(0, FEW)
        key = (tl.load(few_ptr + nth, mask=nth < few, other=0) >> FIELD) & KEYS
        over = tl.maximum(key - floor, 0)
        octave = tl.minimum((over - SINGLE) >> LOW, BINS - 1 - SINGLE)
        bin = tl.where(over < SINGLE, over, SINGLE + octave)
        counts += tl.histogram(bin, BINS, mask=(nth < few) & (key >= floor))
    return counts


@triton.jit
def _list(
    own,
    few,
    lowest,
    ties,
    ties_before,  # of earlier parts
    ids_ptr,  # start of this part
    FEW: tl.constexpr,
):
    """Lists the few above the lowest score, and the required number of those equal to it."""
    for start in range(0, few, FEW):
        nth = start + tl.arange(0, FEW)
        word = _rows(tl.load(own.few + nth, mask=nth < few, other=0), FEW, 4)
        key = tl.where(_rows(nth < few, FEW, 4), (word >> FIELD) & KEYS, -1)
        best, tied = (key > lowest).to(tl.int32), (key == lowest).to(tl.int32)
        before, found = _before(best | (tied << HALF))
        nth_tie = ties_before + (before >> HALF)
        tl.store(
            ids_ptr + (before & HALF_MASK) + tl.minimum(nth_tie, ties),
            own.begin + (word & MASK),
            mask=(best | (tied & (nth_tie < ties))) != 0,
        )
        ids_ptr += found & HALF_MASK
        ties_before += found >> HALF


@triton.jit
def _counts(
    counts_ptr,  # [PARTS, BINS], of one head
    part,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Adds the counts of all parts, and those of the parts before `part`."""
    whole, earlier = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for nth in tl.static_range(PARTS):
        counts = tl.load(counts_ptr + nth * BINS + tl.arange(0, BINS))
        whole += counts
        earlier += tl.where(part > nth, counts, 0)
    return whole, earlier


@triton.jit
def _end(counts, wanted):
    """Returns the bin in which the `wanted` largest end, and the number above that bin."""
    from_here = tl.cumsum(counts, 0, reverse=True)  # in this bin or above it
    bin = tl.maximum(tl.sum((from_here >= wanted).to(tl.int32), 0) - 1, 0)
    bins = tl.arange(0, counts.shape[0])
    return bin, tl.sum(tl.where(bins > bin, counts, 0), 0)


@triton.jit
def _rows(numbers, SIZE: tl.constexpr, ROW: tl.constexpr):
    """Arranges numbers in rows.

    A row is the 16 bytes that a thread loads at once, so no numbers move between threads when rows
    are summed or numbers are stored.
    """
    return tl.reshape(numbers, [SIZE // ROW, ROW])


@triton.jit
def _before(numbers):
    """Returns the exclusive cumulative sum of numbers in rows, and their total."""
    of_rows = tl.sum(numbers, 1)
    before = (tl.cumsum(of_rows, 0) - of_rows)[:, None] + tl.cumsum(numbers, 1) - numbers
    return before, tl.sum(of_rows, 0)
