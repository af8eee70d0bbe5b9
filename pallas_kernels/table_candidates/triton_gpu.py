"""Implements `api.table_candidates` with jax-triton, in four launches over all slots.

Scores are not negative, so that their bits order them. Three histograms find a head's threshold
exactly, each of five bits of those scores that agree with it in the bits before. A histogram of
32 bins takes a sixth of the time that one of 256 takes. Heads are cut into chunks, a program each;
the histograms of the chunks before its own tell a program where its part of the list begins.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, BFloat16

from jsparse.pallas_kernels.table_candidates.rules import Best, Rule
from jsparse.selection import Selection
from jsparse.shapes import Lengths

PROGRAMS = 128  # there are at least as many chunks of all heads, where they are long enough
SMALLEST, LARGEST = 1024, 8192  # slots per chunk
NUM_WARPS = 8
BINS = tl.constexpr(32)
# where numbers of slots lie in an integer of 64 bits
FIELD = tl.constexpr(21)
MASK = tl.constexpr((1 << 21) - 1)
ROW = tl.constexpr(32)  # slots that are added up before the sums of rows are


def table_candidates(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    lengths: Lengths,
    rule: Rule,
    *,
    capacity: int,
    sink: int,
) -> Selection:
    """Implement `api.table_candidates` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    assert isinstance(rule, Best)
    slots, pairs = vertical.shape[2], lengths.size
    chunk = min(max(triton.next_power_of_2(slots * pairs // PROGRAMS), SMALLEST), LARGEST)
    chunks = triton.cdiv(slots, chunk)
    grid = (chunks, pairs)
    sizes = {"SLOTS": slots, "SINK": sink, "CHUNK": chunk, "CHUNKS": chunks, "CAPACITY": capacity}
    sizes |= {"PADDED": triton.next_power_of_2(chunks), "num_warps": NUM_WARPS}
    histograms = jax.ShapeDtypeStruct((pairs, chunks, BINS.value), jnp.int16)
    keys, first = triton_call(
        *(jax.lax.bitcast_convert_type(table, jnp.int16) for table in (vertical, distance)),
        lengths,
        kernel=key_kernel,
        out_shape=[jax.ShapeDtypeStruct((pairs, slots), jnp.int16), histograms],
        grid=grid,
        **sizes,
    )
    given = keys, lengths, rule.number, first

    def counted(level: int, second: Array) -> Array:
        return triton_call(
            *(*given, second),
            kernel=count_kernel,
            out_shape=histograms,
            grid=grid,
            LEVEL=level,
            **sizes,
        )

    second = counted(1, first)  # a stand-in, never read
    third = counted(2, second)
    ids, count = triton_call(
        *(*given, second, third),
        kernel=list_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((*lengths.shape, capacity), jnp.int32),
            jax.ShapeDtypeStruct(lengths.shape, jnp.int32),
        ],
        grid=grid,
        SHARE=triton.next_power_of_2(triton.cdiv(capacity, chunks)),
        **sizes,
    )
    return Selection(ids, count, granularity="token")


@triton.jit
def key_kernel(
    vertical_ptr,  # [pairs, SLOTS], the bits of bfloat16
    distance_ptr,  # [pairs, SLOTS], likewise
    lengths_ptr,  # [pairs]
    keys_ptr,  # [pairs, SLOTS]
    counts_ptr,  # [pairs, CHUNKS, 32]
    SLOTS: tl.constexpr,
    SINK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Store a chunk's scores as integers, and the histogram of their upper five bits."""
    chunk, pair = tl.program_id(0), tl.program_id(1)
    newest = tl.load(lengths_ptr + pair) - 1
    base = pair.to(tl.int64) * SLOTS
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    ranked = (slot >= SINK) & (slot < newest)
    vertical = tl.load(vertical_ptr + base + slot, mask=ranked, other=0)
    distance = tl.load(distance_ptr + base + newest - slot, mask=ranked, other=0)
    key = tl.maximum(tl.maximum(vertical, distance).to(tl.int32), 0)
    tl.store(keys_ptr + base + slot, key.to(tl.int16), mask=ranked)
    found = tl.histogram(key >> 10, BINS, mask=ranked)
    at = (pair * CHUNKS + chunk) * BINS
    tl.store(counts_ptr + at + tl.arange(0, BINS), found.to(tl.int16))


@triton.jit
def _numbers(lengths_ptr, number_ptr, pair, SINK: tl.constexpr, CAPACITY: tl.constexpr):
    """Return a head's newest slot, how many it lists, and how many of these are ranked."""
    length = tl.load(lengths_ptr + pair)
    number = tl.minimum(tl.maximum(tl.load(number_ptr + pair), 1), CAPACITY)
    count = tl.minimum(number, length)
    return length - 1, count, tl.maximum(count - tl.minimum(length - 1, SINK) - 1, 0)


@triton.jit
def _bin(
    counts_ptr,  # [CHUNKS, 32], of one head
    wanted,
    chunk,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Find the bin in which the `wanted` greatest end.

    Returns:
        The bin, how many lie above it in all chunks and in those before `chunk`, and how many in
        it in the chunks before.
    """
    nth, bits = tl.arange(0, PADDED)[:, None], tl.arange(0, BINS)
    counts = tl.load(counts_ptr + nth * BINS + bits[None, :], mask=nth < CHUNKS, other=0)
    counts = counts.to(tl.int64)
    # several numbers lie in one integer, since a reduction takes as long as all else
    sums = tl.sum(counts + (tl.where(nth < chunk, counts, 0) << FIELD), 0)
    whole, earlier = sums & MASK, sums >> FIELD
    least = tl.cumsum(whole, 0, reverse=True)  # as many are in this bin or above it
    found = tl.maximum(tl.sum((least >= wanted).to(tl.int32), 0) - 1, 0)
    parts = tl.where(bits > found, sums, tl.where(bits == found, earlier << 2 * FIELD, 0))
    parts = tl.sum(parts, 0)
    above, above_before = parts & MASK, (parts >> FIELD) & MASK
    return found, above.to(tl.int32), above_before.to(tl.int32), (parts >> 2 * FIELD).to(tl.int32)


@triton.jit
def count_kernel(
    keys_ptr,  # [pairs, SLOTS]
    lengths_ptr,  # [pairs]
    number_ptr,  # [pairs]
    first_ptr,  # [pairs, CHUNKS, 32]
    second_ptr,  # [pairs, CHUNKS, 32]; for LEVEL = 2
    counts_ptr,  # [pairs, CHUNKS, 32]
    SLOTS: tl.constexpr,
    SINK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """Store the histogram of the next five bits of those scores that may be the threshold."""
    chunk, pair = tl.program_id(0), tl.program_id(1)
    newest, _, wanted = _numbers(lengths_ptr, number_ptr, pair, SINK, CAPACITY)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    ranked = (slot >= SINK) & (slot < newest)
    key = tl.load(keys_ptr + pair.to(tl.int64) * SLOTS + slot, mask=ranked, other=0).to(tl.int32)
    at = pair * CHUNKS * BINS
    begins, over, _, _ = _bin(first_ptr + at, wanted, chunk, CHUNKS, PADDED)
    if LEVEL == 2:
        more, _, _, _ = _bin(second_ptr + at, wanted - over, chunk, CHUNKS, PADDED)
        begins = begins * BINS + more
    bits = key >> (10 - 5 * LEVEL)
    found = tl.histogram(bits & (BINS - 1), BINS, mask=ranked & (bits // BINS == begins))
    tl.store(counts_ptr + at + chunk * BINS + tl.arange(0, BINS), found.to(tl.int16))


@triton.jit
def _before(numbers):
    """Sum what stands before each of the numbers, which are in rows."""
    of_rows = tl.sum(numbers, 1)
    return (tl.cumsum(of_rows, 0) - of_rows)[:, None] + tl.cumsum(numbers, 1) - numbers


@triton.jit
def list_kernel(
    keys_ptr,  # [pairs, SLOTS]
    lengths_ptr,  # [pairs]
    number_ptr,  # [pairs]
    first_ptr,  # [pairs, CHUNKS, 32]
    second_ptr,  # [pairs, CHUNKS, 32]
    third_ptr,  # [pairs, CHUNKS, 32]
    ids_ptr,  # [pairs, CAPACITY]
    count_ptr,  # [pairs]
    SLOTS: tl.constexpr,
    SINK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Write a chunk's part of the list, and zeros into its share of what lies behind the list."""
    chunk, pair = tl.program_id(0), tl.program_id(1)
    newest, count, wanted = _numbers(lengths_ptr, number_ptr, pair, SINK, CAPACITY)
    at = pair * CHUNKS * BINS
    upper, over1, before1, _ = _bin(first_ptr + at, wanted, chunk, CHUNKS, PADDED)
    middle, over2, before2, _ = _bin(second_ptr + at, wanted - over1, chunk, CHUNKS, PADDED)
    lower, over3, before3, ties_before = _bin(
        third_ptr + at, wanted - over1 - over2, chunk, CHUNKS, PADDED
    )
    least = (upper * BINS + middle) * BINS + lower
    ties = wanted - over1 - over2 - over3  # as many are listed, the lowest slots first
    slot = chunk * CHUNK + tl.reshape(tl.arange(0, CHUNK), [CHUNK // ROW, ROW])
    ranked = (slot >= SINK) & (slot < newest)
    key = tl.load(keys_ptr + pair.to(tl.int64) * SLOTS + slot, mask=ranked, other=0).to(tl.int32)
    sinks = tl.minimum(tl.minimum(newest, SINK), count)
    tied = (ranked & (key == least)).to(tl.int32)
    nth_tie = ties_before + _before(tied)
    listed = (ranked & (key > least)) | (slot < sinks) | ((tied != 0) & (nth_tie < ties))
    place = tl.minimum(chunk * CHUNK, sinks) + before1 + before2 + before3
    place += tl.minimum(ties_before, ties) + _before(listed.to(tl.int32))
    ids_ptr += pair.to(tl.int64) * CAPACITY
    tl.store(ids_ptr + place, slot, mask=listed)
    behind = chunk * SHARE + tl.arange(0, SHARE)
    tl.store(
        ids_ptr + behind, tl.zeros([SHARE], tl.int32), mask=(behind >= count) & (behind < CAPACITY)
    )
    if chunk == 0:
        tl.store(count_ptr + pair, count)
        # the newest ranks below the sinks, and above all others
        tl.store(ids_ptr + count - 1, newest, mask=count > tl.minimum(tl.maximum(newest, 0), SINK))
