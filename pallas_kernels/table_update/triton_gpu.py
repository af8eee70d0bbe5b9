"""Implements `api.table_update` with jax-triton, in one launch.

Every head has several programs, each of which adds the weights of one part of the list. The sum of
all weights each of them finds for itself: the logits of one list are read from the second-level
cache sooner than programs meet.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, BFloat16, Float32

from jsparse.partials import ListedLogits
from jsparse.shapes import Lengths

PROGRAMS = 256  # of all heads, where parts are not below SMALLEST
SMALLEST = 256  # entries of a part at least
BLOCK = 2048  # entries that are summed at once
NUM_WARPS = 8


def table_update(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    listed: ListedLogits,
    lengths: Lengths,
    scale: Float32[Array, "B"],
    *,
    sink: int,
    penalty: float,
) -> tuple[BFloat16[Array, "B K S"], BFloat16[Array, "B K S"]]:
    """Implement `api.table_update` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads, group, entries), slots = listed.logits.shape, vertical.shape[2]
    pairs = batch * heads
    parts = max(min(triton.cdiv(PROGRAMS, pairs), entries // SMALLEST), 1)
    share = triton.cdiv(entries, parts)
    vertical, distance = triton_call(
        *(vertical, distance, listed.ids, listed.count, listed.logits, listed.lse),
        *(lengths, scale),
        kernel=update_kernel,
        out_shape=[jax.ShapeDtypeStruct(vertical.shape, jnp.bfloat16)] * 2,
        input_output_aliases={0: 0, 1: 1},
        grid=(parts, pairs),
        num_warps=NUM_WARPS,
        HEADS=heads,
        SLOTS=slots,
        ENTRIES=entries,
        ALIGNED=math.gcd(entries, 4),
        G=group,
        SINK=sink,
        SINKS=triton.next_power_of_2(max(sink, 1)),
        PENALTY=penalty,
        BLOCK=min(BLOCK, triton.next_power_of_2(entries)),
        SHARE=share,
        PADDED=triton.next_power_of_2(share),
    )
    return vertical, distance


@triton.jit
def _sinks(ids_ptr, count, SINK: tl.constexpr, SINKS: tl.constexpr):
    """Count the sinks of a list, which come first, since ids ascend."""
    nth = tl.arange(0, SINKS)
    first = tl.load(ids_ptr + nth, mask=(nth < SINK) & (nth < count), other=SINK)
    return tl.sum((first < SINK).to(tl.int32), 0)


@triton.jit
def _weights(
    logits_ptr,  # [G, ENTRIES]
    lse_ptr,  # [G]
    entry,
    first,
    count,
    ENTRIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    G: tl.constexpr,
):
    """Return the greatest weight over the group of entries `first` to `count`, as a logarithm."""
    minus_inf = float("-inf")
    # up to a multiple of a power of two, as the compiler knows: it then loads several at once
    inside = entry < tl.cdiv(count, ALIGNED) * ALIGNED
    best = tl.full(entry.shape, minus_inf, tl.float32)
    for row in tl.static_range(G):
        lse = tl.load(lse_ptr + row)
        logits = tl.load(logits_ptr + row * ENTRIES + entry, mask=inside, other=minus_inf)
        best = tl.maximum(best, logits - tl.where(lse == minus_inf, 0.0, lse))
    return tl.where((entry >= first) & (entry < count), best, minus_inf)


@triton.jit
def update_kernel(
    _vertical,  # an alias of vertical_ptr
    _distance,  # an alias of distance_ptr
    ids_ptr,  # [pairs, ENTRIES]
    count_ptr,  # [pairs]
    logits_ptr,  # [pairs, G, ENTRIES]
    lse_ptr,  # [pairs, G]
    lengths_ptr,  # [pairs]
    scale_ptr,  # [pairs / HEADS]
    vertical_ptr,  # [pairs, SLOTS]
    distance_ptr,  # [pairs, SLOTS]
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    G: tl.constexpr,
    SINK: tl.constexpr,
    SINKS: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Add the weights of a part of a list, divided by the sum of all, to both tables."""
    minus_inf = float("-inf")
    part, pair = tl.program_id(0), tl.program_id(1)
    count, newest = tl.load(count_ptr + pair), tl.load(lengths_ptr + pair) - 1
    scale = tl.load(scale_ptr + pair // HEADS)
    ids_ptr += pair.to(tl.int64) * ENTRIES
    logits_ptr += pair.to(tl.int64) * ENTRIES * G
    lse_ptr += pair * G
    vertical_ptr += pair.to(tl.int64) * SLOTS
    distance_ptr += pair.to(tl.int64) * SLOTS + newest
    sinks = _sinks(ids_ptr, count, SINK, SINKS)

    # what is far away is asked for first, so that it comes while the sum is found
    nth = tl.arange(0, PADDED)
    own = part * SHARE + nth
    counts = (nth < SHARE) & (own >= sinks) & (own < count)
    slot = tl.load(ids_ptr + own, mask=counts, other=0)
    old = tl.load(vertical_ptr + slot, mask=counts, other=0.0).to(tl.float32)
    past = tl.load(distance_ptr - slot, mask=counts, other=0.0).to(tl.float32)

    top = tl.full([BLOCK], minus_inf, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)  # of weights, each divided by its place's greatest
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        weights = _weights(logits_ptr, lse_ptr, entry, sinks, count, ENTRIES, ALIGNED, G)
        higher = tl.maximum(top, weights)
        base = tl.where(higher == minus_inf, 0.0, higher)  # -inf less -inf would be NaN
        sums = sums * tl.exp(top - base) + tl.exp(weights - base)
        top = higher
    base = tl.max(top, 0)
    base = tl.where(base == minus_inf, 0.0, base)
    whole = tl.sum(sums * tl.exp(top - base), 0)

    weights = _weights(logits_ptr, lse_ptr, own, sinks, count, ENTRIES, ALIGNED, G)
    added = tl.exp(weights - base) / tl.where(whole > 0, whole, 1.0)
    added = scale * (added - PENALTY / tl.maximum(count - sinks, 1))
    tl.store(vertical_ptr + slot, (old + added).to(tl.bfloat16), mask=counts)
    tl.store(distance_ptr - slot, (past + added).to(tl.bfloat16), mask=counts)
