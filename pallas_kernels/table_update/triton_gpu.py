"""Implements `api.table_update` with jax-triton, in two launches over blocks of the lists.

The first finds each entry's greatest weight over the group, as a logarithm, and every block's sum;
the second, which needs the sum over all blocks, adds.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, BFloat16, Float32

from jsparse.partials import ListedLogits
from jsparse.shapes import Lengths

BLOCK = 1024  # entries per program
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
    """Implement `api.table_update` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads, group, entries), slots = listed.logits.shape, vertical.shape[2]
    block = min(BLOCK, triton.next_power_of_2(entries))
    blocks = triton.cdiv(entries, block)
    sizes = {"ENTRIES": entries, "BLOCK": block, "SINK": sink}
    sizes |= {"SINKS": triton.next_power_of_2(max(sink, 1)), "num_warps": NUM_WARPS}
    weights, tops, sums = triton_call(
        *(listed.ids, listed.count, listed.logits, listed.lse),
        kernel=weigh_kernel,
        out_shape=[
            jax.ShapeDtypeStruct(listed.ids.shape, jnp.float32),
            *[jax.ShapeDtypeStruct((batch * heads, blocks), jnp.float32)] * 2,
        ],
        grid=(blocks, batch * heads),
        G=group,
        **sizes,
    )
    vertical, distance = triton_call(
        *(vertical, distance, listed.ids, listed.count, weights, tops, sums, lengths, scale),
        kernel=add_kernel,
        out_shape=[jax.ShapeDtypeStruct(vertical.shape, jnp.bfloat16)] * 2,
        input_output_aliases={0: 0, 1: 1},
        grid=(blocks, batch * heads),
        HEADS=heads,
        SLOTS=slots,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        PENALTY=penalty,
        **sizes,
    )
    return vertical, distance


@triton.jit
def _sinks(ids_ptr, count, SINK: tl.constexpr, SINKS: tl.constexpr):
    """Count the sinks of a list, which come first, since ids ascend."""
    nth = tl.arange(0, SINKS)
    first = tl.load(ids_ptr + nth, mask=(nth < SINK) & (nth < count), other=SINK)
    return tl.sum((first < SINK).to(tl.int32), 0)


@triton.jit
def weigh_kernel(
    ids_ptr,  # [pairs, ENTRIES]
    count_ptr,  # [pairs]
    logits_ptr,  # [pairs, G, ENTRIES]
    lse_ptr,  # [pairs, G]
    weights_ptr,  # [pairs, ENTRIES]
    tops_ptr,  # [pairs, blocks]
    sums_ptr,  # [pairs, blocks]
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    SINKS: tl.constexpr,
    G: tl.constexpr,
):
    """Store the greatest weight over the group of each entry that counts, as a logarithm.

    Of a block, store the greatest, and the sum of all weights, divided by it.
    """
    minus_inf = float("-inf")
    block, pair = tl.program_id(0), tl.program_id(1)
    count = tl.load(count_ptr + pair)
    line = pair.to(tl.int64) * ENTRIES
    entry = block * BLOCK + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], minus_inf, tl.float32)
    for row in tl.static_range(G):
        lse = tl.load(lse_ptr + pair * G + row)
        logits = tl.load(
            logits_ptr + line * G + row * ENTRIES + entry, mask=entry < count, other=minus_inf
        )
        best = tl.maximum(best, logits - tl.where(lse == minus_inf, 0.0, lse))
    sinks = _sinks(ids_ptr + line, count, SINK, SINKS)
    best = tl.where((entry >= sinks) & (entry < count), best, minus_inf)
    tl.store(weights_ptr + line + entry, best, mask=entry < ENTRIES)
    top = tl.max(best, 0)
    base = tl.where(top == minus_inf, 0.0, top)  # -inf less -inf would be NaN
    at = pair * tl.num_programs(0) + block
    tl.store(tops_ptr + at, base)
    tl.store(sums_ptr + at, tl.sum(tl.exp(best - base), 0))


@triton.jit
def add_kernel(
    _vertical,  # an alias of vertical_ptr
    _distance,  # an alias of distance_ptr
    ids_ptr,  # [pairs, ENTRIES]
    count_ptr,  # [pairs]
    weights_ptr,  # [pairs, ENTRIES]
    tops_ptr,  # [pairs, BLOCKS]
    sums_ptr,  # [pairs, BLOCKS]
    lengths_ptr,  # [pairs]
    scale_ptr,  # [pairs / HEADS]
    vertical_ptr,  # [pairs, SLOTS]
    distance_ptr,  # [pairs, SLOTS]
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    PENALTY: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add the weights of a block, divided by the sum of all, to both tables."""
    block, pair = tl.program_id(0), tl.program_id(1)
    count, newest = tl.load(count_ptr + pair), tl.load(lengths_ptr + pair) - 1
    scale = tl.load(scale_ptr + pair // HEADS)
    line, base = pair.to(tl.int64) * ENTRIES, pair.to(tl.int64) * SLOTS
    sinks = _sinks(ids_ptr + line, count, SINK, SINKS)
    nth = tl.arange(0, PADDED)
    sums = tl.load(sums_ptr + pair * BLOCKS + nth, mask=nth < BLOCKS, other=0.0)
    tops = tl.load(tops_ptr + pair * BLOCKS + nth, mask=nth < BLOCKS, other=float("-inf"))
    tops = tl.where(sums > 0, tops, float("-inf"))  # of blocks in which something counts
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    whole = tl.sum(sums * tl.exp(tops - top), 0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    counts = (entry >= sinks) & (entry < count)
    slot = tl.load(ids_ptr + line + entry, mask=counts, other=0)
    weights = tl.exp(tl.load(weights_ptr + line + entry, mask=counts, other=float("-inf")) - top)
    added = weights / tl.where(whole > 0, whole, 1.0) - PENALTY / tl.maximum(count - sinks, 1)
    old = tl.load(vertical_ptr + base + slot, mask=counts, other=0.0).to(tl.float32)
    past = tl.load(distance_ptr + base + newest - slot, mask=counts, other=0.0).to(tl.float32)
    tl.store(vertical_ptr + base + slot, (old + scale * added).to(tl.bfloat16), mask=counts)
    tl.store(
        distance_ptr + base + newest - slot, (past + scale * added).to(tl.bfloat16), mask=counts
    )
