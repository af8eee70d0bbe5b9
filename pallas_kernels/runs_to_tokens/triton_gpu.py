"""Implements `api.runs_to_tokens` with jax-triton, one program per head.

A program processes blocks of runs. The cumulative sum of their lengths gives each run's start in
the list. The runs of a block are written in parallel, `TILE` slots of each at a time; most runs are
no longer than that.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int32

from jsparse.selection import Selection
from jsparse.shapes import Lengths

BLOCK = 256  # runs per block
TILE = 16  # slots of a run at a time
ZEROS = 1024  # entries cleared at a time
NUM_WARPS = 8


def runs_to_tokens(
    ids: Int32[Array, "B K R"],
    count: Lengths,
    edges: Int32[Array, "B #K edges"],
    lengths: Lengths | None,
    *,
    capacity: int,
) -> Selection:
    """Implements `api.runs_to_tokens` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, heads, listed = ids.shape
    outside = lengths is not None
    tokens, total = triton_call(
        ids,
        count,
        edges,
        lengths if outside else count,  # placeholder, never read
        kernel=list_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, capacity), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
        ],
        grid=(batch * heads,),
        num_warps=NUM_WARPS,
        R=listed,
        N=edges.shape[2] - 1,
        C=capacity,
        SHARING=heads // edges.shape[1],
        OUTSIDE=outside,
        BLOCK=min(BLOCK, triton.next_power_of_2(listed + 2 * outside)),
        TILE=TILE,
        ZEROS=min(ZEROS, triton.next_power_of_2(capacity)),
    )
    return Selection(tokens, total, granularity="token")


@triton.jit
def maxima(a, b, c, d):
    """Computes two maxima."""
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def list_kernel(
    ids_ptr,  # [pairs, R]
    count_ptr,  # [pairs]
    edges_ptr,  # [pairs / SHARING, N + 1]
    lengths_ptr,  # [pairs], read where OUTSIDE
    tokens_ptr,  # [pairs, C]
    total_ptr,  # [pairs]
    R: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    SHARING: tl.constexpr,
    OUTSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Lists the slots of one head's runs."""
    pair = tl.program_id(0).to(tl.int64)
    ids_ptr += pair * R
    tokens_ptr += pair * C
    edges_ptr += pair // SHARING * (N + 1)
    count = tl.load(count_ptr + pair)
    total = count * 0
    # loop to R instead of the count, so that ids need not wait for it
    for first in range(0, R + 2 * OUTSIDE, BLOCK):
        nth = first + tl.arange(0, BLOCK)
        if OUTSIDE:  # run -1 is before all others, run N after them
            held = tl.load(lengths_ptr + pair)
            run = tl.load(ids_ptr + nth - 1, mask=(nth > 0) & (nth <= R), other=-1)
            run = tl.where(nth <= count, run, N)
            chosen = nth < count + 2
            start = tl.load(edges_ptr + run, mask=chosen & (run >= 0), other=0)
            end = tl.load(edges_ptr + run + 1, mask=chosen & (run < N), other=held)
            length = tl.where(chosen, tl.maximum(tl.minimum(end, held) - start, 0), 0)
        else:
            run = tl.load(ids_ptr + nth, mask=nth < R, other=0)
            chosen = (nth < count) & (nth < R)
            start = tl.load(edges_ptr + run, mask=chosen, other=0)
            length = tl.load(edges_ptr + run + 1, mask=chosen, other=0) - start
        # start and end of runs in the list, up to its capacity
        end = total + tl.cumsum(length, 0)
        begin = tl.minimum(end - length, C)
        end = tl.minimum(end, C)
        total, longest = tl.reduce((end, end - begin), 0, maxima)
        for done in range(0, longest, TILE):
            slot = done + tl.arange(0, TILE)[None, :]  # of each run
            inside = slot < (end - begin)[:, None]
            tl.store(tokens_ptr + begin[:, None] + slot, start[:, None] + slot, mask=inside)
    tl.store(total_ptr + pair, total)
    for done in range(total, C, ZEROS):
        slot = done + tl.arange(0, ZEROS)
        tl.store(tokens_ptr + slot, slot * 0, mask=slot < C)
