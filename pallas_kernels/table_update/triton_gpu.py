"""Implements `api.table_update` with jax-triton, in one launch.

Every head has several programs, each of which adds the weights of one part of the list. They
synchronise to get the sum over all parts (triton_meeting.py).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, BFloat16, Float32

from jsparse.pallas_kernels.triton_meeting import max_programs, meet
from jsparse.selection.partials import ListedLogits
from jsparse.shapes import Lengths

PROGRAMS = 512  # of all heads, with SMALLEST to LARGEST entries per part
SMALLEST, LARGEST = 256, 2048
NUM_WARPS = 4


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
    """Implements `api.table_update` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads, group, entries), slots = listed.logits.shape, vertical.shape[2]
    pairs = batch * heads
    parts = max(min(triton.cdiv(PROGRAMS, pairs), entries // SMALLEST), 1)
    parts = min(max(parts, triton.cdiv(entries, LARGEST)), max_programs())
    share = triton.cdiv(entries, parts)
    tables = [jax.ShapeDtypeStruct(vertical.shape, jnp.bfloat16)] * 2
    vertical, distance, *_ = triton_call(
        vertical,
        distance,
        listed.ids,
        listed.count,
        listed.logits,
        listed.lse,
        lengths,
        scale,
        kernel=update_kernel,
        out_shape=[
            *tables,
            # from here on, scratch memory of the kernel
            jax.ShapeDtypeStruct((pairs, parts), jnp.float32),
            jax.ShapeDtypeStruct((pairs, parts), jnp.float32),
            jax.ShapeDtypeStruct((pairs,), jnp.int32),
        ],
        input_output_aliases={0: 0, 1: 1},
        zeroed_outputs=(4,) if parts > 1 else (),
        grid=(parts * pairs,),
        num_warps=NUM_WARPS,
        HEADS=heads,
        SLOTS=slots,
        ENTRIES=entries,
        G=group,
        SINK=sink,
        SINKS=triton.next_power_of_2(max(sink, 1)),
        PENALTY=penalty,
        PARTS=parts,
        PADDED=triton.next_power_of_2(parts),
        SHARE=share,
        BLOCK=triton.next_power_of_2(share),
    )
    return vertical, distance


@triton.jit
def _sinks(ids_ptr, count, SINK: tl.constexpr, SINKS: tl.constexpr):
    """Counts the sinks of a list, which come first, since ids ascend."""
    nth = tl.arange(0, SINKS)
    first = tl.load(ids_ptr + nth, mask=(nth < SINK) & (nth < count), other=SINK)
    return tl.sum((first < SINK).to(tl.int32), 0)


@triton.jit
def update_kernel(
    _vertical,  # alias of vertical_ptr
    _distance,  # alias of distance_ptr
    ids_ptr,  # [pairs, ENTRIES]
    count_ptr,  # [pairs]
    logits_ptr,  # [pairs, G, ENTRIES]
    lse_ptr,  # [pairs, G]
    lengths_ptr,  # [pairs]
    scale_ptr,  # [pairs / HEADS]
    vertical_ptr,  # [pairs, SLOTS]
    distance_ptr,  # [pairs, SLOTS]
    tops_ptr,  # [pairs, PARTS]
    sums_ptr,  # [pairs, PARTS]
    arrived_ptr,  # [pairs], zeros if there are several parts
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    G: tl.constexpr,
    SINK: tl.constexpr,
    SINKS: tl.constexpr,
    PENALTY: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the weights of a part of a list, divided by the sum of all, to both tables."""
    minus_inf = float("-inf")
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    count, newest = tl.load(count_ptr + pair), tl.load(lengths_ptr + pair) - 1
    scale = tl.load(scale_ptr + pair // HEADS)
    ids_ptr += pair.to(tl.int64) * ENTRIES
    logits_ptr += pair.to(tl.int64) * ENTRIES * G
    vertical_ptr += pair.to(tl.int64) * SLOTS
    distance_ptr += pair.to(tl.int64) * SLOTS + newest
    sinks = _sinks(ids_ptr, count, SINK, SINKS)
    nth = tl.arange(0, BLOCK)
    entry = part * SHARE + nth
    counts = (nth < SHARE) & (entry >= sinks) & (entry < count)

    # issue the slow loads first, so that they complete while programs synchronise
    slot = tl.load(ids_ptr + entry, mask=counts, other=0)
    old = tl.load(vertical_ptr + slot, mask=counts, other=0.0).to(tl.float32)
    past = tl.load(distance_ptr - slot, mask=counts, other=0.0).to(tl.float32)

    # the largest weight over the group, as a logarithm
    best = tl.full([BLOCK], minus_inf, tl.float32)
    for row in tl.static_range(G):
        lse = tl.load(lse_ptr + pair * G + row)
        logits = tl.load(logits_ptr + row * ENTRIES + entry, mask=counts, other=minus_inf)
        best = tl.maximum(best, logits - tl.where(lse == minus_inf, 0.0, lse))
    own_top = tl.max(best, 0)
    base = tl.where(own_top == minus_inf, 0.0, own_top)  # -inf - -inf would be NaN
    weights = tl.exp(best - base)
    tl.store(tops_ptr + pair * PARTS + part, own_top)
    tl.store(sums_ptr + pair * PARTS + part, tl.sum(weights, 0))
    meet(arrived_ptr + pair, 0, PARTS)

    parts = tl.arange(0, PADDED)
    tops = tl.load(tops_ptr + pair * PARTS + parts, mask=parts < PARTS, other=minus_inf)
    sums = tl.load(sums_ptr + pair * PARTS + parts, mask=parts < PARTS, other=0.0)
    top = tl.max(tops, 0)
    top = tl.where(top == minus_inf, 0.0, top)
    whole = tl.sum(sums * tl.exp(tops - top), 0)
    # the base of a part without weights may be above the top
    part_of_top = tl.where(own_top == minus_inf, 0.0, tl.exp(base - top))
    added = weights * (part_of_top / tl.where(whole > 0, whole, 1.0))
    added = scale * (added - PENALTY / tl.maximum(count - sinks, 1))
    tl.store(vertical_ptr + slot, (old + added).to(tl.bfloat16), mask=counts)
    tl.store(distance_ptr - slot, (past + added).to(tl.bfloat16), mask=counts)
