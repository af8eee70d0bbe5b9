"""Implements the rule Kurtosis of `api.table_candidates` with jax-triton, in three launches.

A head's slots are cut into parts, each of which a program holds whole.

1. Every part finds the greatest entry of either table, and the central moments of its entries
   divided by it, so that fourth powers stay within float32.
2. Every part adds all parts' moments up to both tables' means and thresholds, and ranks its slots
   as the reference does.
3. threshold_select lists the slots of greatest rank.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, BFloat16

from jsparse.pallas_kernels.table_candidates import reference
from jsparse.pallas_kernels.table_candidates.rules import CandidateRule, Kurtosis
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.selection import Selection
from jsparse.shapes import Lengths

TILE = 2048  # slots of a part
NUM_WARPS = 8
# what is stored of a part: its number of ranked slots, then MOMENTS of each table, which are the
# greatest entry, the mean, and the sums of second, third and fourth powers around it
MOMENTS = tl.constexpr(5)
FIELDS = tl.constexpr(11)
FIRST_OFFSET = tl.constexpr(min(reference.OFFSETS))
LAST_OFFSET = tl.constexpr(max(reference.OFFSETS))
MARKED = tl.constexpr(reference.MARKED)
NEWEST = tl.constexpr(reference.NEWEST)
SINKS = tl.constexpr(reference.SINKS)


def table_candidates(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    lengths: Lengths,
    rule: CandidateRule,
    *,
    capacity: int,
    sink: int,
) -> Selection:
    """Implements `api.table_candidates` under the rule Kurtosis with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    assert isinstance(rule, Kurtosis)
    slots, pairs = vertical.shape[2], lengths.size
    tile = min(TILE, triton.next_power_of_2(slots))
    parts = triton.cdiv(slots, tile)
    arrays = (
        *(jax.lax.bitcast_convert_type(table, jnp.int16) for table in (vertical, distance)),
        lengths,
    )
    sizes = {"SLOTS": slots, "SINK": sink, "PARTS": parts, "TILE": tile}
    launch = {"grid": (pairs * parts,), "num_warps": NUM_WARPS, **sizes}
    (moments,) = triton_call(
        *arrays,
        kernel=table_moments_kernel,
        out_shape=[jax.ShapeDtypeStruct((pairs, parts, FIELDS.value), jnp.float32)],
        **launch,
    )
    ranks, marked = triton_call(
        *arrays,
        moments,
        kernel=table_ranks_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((*lengths.shape, 1, slots), jnp.float32),
            jax.ShapeDtypeStruct((*lengths.shape, parts), jnp.int32),
        ],
        A=float(rule.a),
        PADDED=triton.next_power_of_2(parts),
        **launch,
    )
    number = jnp.sum(marked, -1) + jnp.minimum(lengths, sink + 1)
    number = jnp.minimum(jnp.maximum(number, rule.min_count), rule.max_count)
    return threshold_select(
        ranks,
        TopK(jnp.clip(number, 1, capacity)),
        capacity=capacity,
        weights="raw",
        lengths=lengths,
        implementation="triton",
    )


@triton.jit
def _entries(
    vertical_ptr,  # [SLOTS], the bits of bfloat16
    distance_ptr,  # where the newest slot's distance, 0, stands
    slot,
    newest,
    SINK: tl.constexpr,
):
    """Returns which slots are ranked, and the bits of their entries, 0 for the others."""
    ranked = (slot >= SINK) & (slot < newest)
    vertical = tl.load(vertical_ptr + slot, mask=ranked, other=0)
    return ranked, vertical, tl.load(distance_ptr - slot, mask=ranked, other=0)


@triton.jit
def _floats(bits):
    """Returns the numbers that have these upper 16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_moments(ptr, x, ranked, number):
    """Describes the ranked entries of one table."""
    greatest = tl.max(tl.abs(x), 0)
    x /= tl.where(greatest > 0, greatest, 1.0)
    mean = tl.sum(x, 0) / tl.maximum(number, 1.0)
    around = tl.where(ranked, x - mean, 0.0)
    square = around * around
    tl.store(ptr, greatest)
    tl.store(ptr + 1, mean)
    tl.store(ptr + 2, tl.sum(square, 0))
    tl.store(ptr + 3, tl.sum(square * around, 0))
    tl.store(ptr + 4, tl.sum(square * square, 0))


@triton.jit
def table_moments_kernel(
    vertical_ptr,  # [pairs, SLOTS], the bits of bfloat16
    distance_ptr,  # [pairs, SLOTS], likewise
    lengths_ptr,  # [pairs]
    moments_ptr,  # [pairs, PARTS, FIELDS]
    SLOTS: tl.constexpr,
    SINK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Describes the ranked slots of one part of a head, as program head · PARTS + part."""
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    newest = tl.load(lengths_ptr + pair) - 1
    vertical_ptr += pair.to(tl.int64) * SLOTS
    distance_ptr += pair.to(tl.int64) * SLOTS + newest
    slot = part * TILE + tl.arange(0, TILE)
    ranked, vertical, distance = _entries(vertical_ptr, distance_ptr, slot, newest, SINK)
    number = tl.sum(ranked.to(tl.float32), 0)
    moments_ptr += tl.program_id(0).to(tl.int64) * FIELDS
    tl.store(moments_ptr, number)
    _store_moments(moments_ptr + 1, _floats(vertical), ranked, number)
    _store_moments(moments_ptr + 1 + MOMENTS, _floats(distance), ranked, number)


@triton.jit
def _limits(
    moments_ptr,  # [PARTS, FIELDS], of one head
    A: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Returns a table's greatest entry, and its threshold and mean as parts of that.

    Moments of parts are added up around the common mean.
    """
    nth = tl.arange(0, PADDED)
    there = nth < PARTS
    moments_ptr += nth * FIELDS
    number = tl.load(moments_ptr, mask=there, other=0.0)
    greatests = tl.load(moments_ptr + FIRST, mask=there, other=0.0)
    greatest = tl.max(greatests, 0)
    greatest = tl.where(greatest > 0, greatest, 1.0)
    scale = greatests / greatest
    square = scale * scale
    means = tl.load(moments_ptr + FIRST + 1, mask=there, other=0.0) * scale
    second = tl.load(moments_ptr + FIRST + 2, mask=there, other=0.0) * square
    third = tl.load(moments_ptr + FIRST + 3, mask=there, other=0.0) * square * scale
    fourth = tl.load(moments_ptr + FIRST + 4, mask=there, other=0.0) * square * square
    mean = tl.sum(number * means, 0) / tl.maximum(tl.sum(number, 0), 1.0)
    off = means - mean
    total = tl.sum(second + number * off * off, 0)
    fourth += 4 * off * third + 6 * off * off * second + number * off * off * off * off
    spread = total > 0
    threshold = A * mean * total * total / tl.where(spread, tl.sum(fourth, 0), 1.0)
    return greatest, tl.where(spread, threshold, float("inf")), mean


@triton.jit
def table_ranks_kernel(
    vertical_ptr,  # [pairs, SLOTS], the bits of bfloat16
    distance_ptr,  # [pairs, SLOTS], likewise
    lengths_ptr,  # [pairs]
    moments_ptr,  # [pairs, PARTS, FIELDS]
    ranks_ptr,  # [pairs, SLOTS]
    marked_ptr,  # [pairs, PARTS]
    SLOTS: tl.constexpr,
    SINK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    A: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Ranks the slots of one part of a head, and counts those that are marked."""
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    newest = tl.load(lengths_ptr + pair) - 1
    row = pair.to(tl.int64) * SLOTS
    vertical_ptr += row
    distance_ptr += row + newest
    moments_ptr += pair.to(tl.int64) * PARTS * FIELDS
    scale_v, min_v, mean_v = _limits(moments_ptr, A, PARTS, PADDED, 1)
    scale_d, min_d, mean_d = _limits(moments_ptr, A, PARTS, PADDED, 1 + MOMENTS)
    slot = part * TILE + tl.arange(0, TILE)
    near = tl.zeros([TILE], tl.int1)
    for offset in tl.static_range(FIRST_OFFSET, LAST_OFFSET + 1):
        ranked, vertical, distance = _entries(
            vertical_ptr, distance_ptr, slot - offset, newest, SINK
        )
        out = (_floats(vertical) / scale_v > min_v) | (_floats(distance) / scale_d > min_d)
        near |= ranked & out
    ranked, vertical, distance = _entries(vertical_ptr, distance_ptr, slot, newest, SINK)
    above = (_floats(vertical) / scale_v > mean_v) | (_floats(distance) / scale_d > mean_d)
    marked = ranked & near & above
    # the bits of scores, which are not negative, order them
    rank = 1 + tl.maximum(tl.maximum(vertical, distance), 0).to(tl.int32)
    rank += tl.where(marked, MARKED, 0)
    rank = tl.where(slot == newest, NEWEST, tl.where(slot < SINK, SINKS, rank))
    tl.store(ranks_ptr + row + slot, rank.to(tl.float32), mask=slot < SLOTS)
    tl.store(marked_ptr + tl.program_id(0), tl.sum(marked.to(tl.int32), 0))
