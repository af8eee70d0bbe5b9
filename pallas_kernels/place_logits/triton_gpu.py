"""Implements `api.place_logits` with jax-triton, one program per block of entries.

XLA fills the output with -inf, and programs write entries to their pages' positions. They loop over
the pages that were read, which are few in a long context.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float32

from jsparse.selection import Selection
from jsparse.selection.partials import MeanStatsKind
from jsparse.shapes import Lengths

TILE = 2048  # logits per program
NUM_WARPS = 4


def place_logits(
    logits: Float32[Array, "pairs slots"],
    selection: Selection,
    lengths: Lengths,
    *,
    stats: MeanStatsKind,
    num_pages: int,
    page_size: int,
    by_slot: bool = False,
) -> Float32[Array, "B K units"]:
    """Implements `api.place_logits` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    units = num_pages if stats == "page_mass" else num_pages * page_size
    nothing = jnp.full((*lengths.shape, units), -jnp.inf, jnp.float32)
    capacity, dense = selection.ids.shape[-1], selection.dense
    entries = max(capacity + 1 if capacity else 0, 0 if dense is None else num_pages)
    if entries == 0:
        return nothing
    tokens = triton.next_power_of_2(page_size)
    block = min(max(TILE // tokens, 1), triton.next_power_of_2(entries))
    return triton_call(
        logits,
        lengths,
        selection.count,
        selection.ids if capacity else lengths,  # placeholder, never read; so is the next
        lengths if dense is None else dense,
        nothing,
        kernel=place_kernel,
        out_shape=jax.ShapeDtypeStruct(nothing.shape, nothing.dtype),
        input_output_aliases={5: 0},
        grid=(triton.cdiv(entries, block), lengths.size),
        num_warps=NUM_WARPS,
        SLOTS=logits.shape[1],
        C=capacity,
        STEPS=capacity.bit_length(),
        M=num_pages,
        P=page_size,
        BLOCK=block,
        TOKENS=tokens,
        HAS_DENSE=dense is not None,
        PAGE_MASS=stats == "page_mass",
        BY_SLOT=by_slot,
    )


@triton.jit
def lists(
    ids_ptr,  # [C], of one head
    count,
    page,
    STEPS: tl.constexpr,
):
    """Returns whether the first `count` > 0 of ascending ids include `page`.

    Most lists end with it or before it and need no search.
    """
    last = tl.load(ids_ptr + count - 1)
    if last > page:
        # bitwise search for the last entry with a page at or before `page`; -1: none
        entry = -1
        for step in tl.static_range(STEPS):
            ahead = entry + (1 << (STEPS - 1 - step))
            listed = tl.load(ids_ptr + ahead, mask=ahead < count, other=2147483647)
            entry = tl.where(listed <= page, ahead, entry)
        last = tl.load(ids_ptr + entry, mask=entry >= 0, other=-1)
    return last == page


@triton.jit
def place_kernel(
    logits_ptr,  # [pairs, SLOTS]
    lengths_ptr,  # [pairs]
    count_ptr,  # [pairs]
    ids_ptr,  # [pairs, C]
    dense_ptr,  # [pairs]
    _nothing_ptr,  # alias of out_ptr, filled with -inf
    out_ptr,  # [pairs, M], or [pairs, M, P]
    SLOTS: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    PAGE_MASS: tl.constexpr,
    BY_SLOT: tl.constexpr,
):
    """Places BLOCK entries of one head."""
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    entry = first + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + pair)
    newest = tl.cdiv(length, P) - 1  # -1 if the head is empty
    page = tl.full([BLOCK], M, tl.int32)  # page M does not exist
    appended = entry < 0
    if C > 0:
        count = tl.where(length > 0, tl.load(count_ptr + pair), 0)
        page = tl.load(ids_ptr + pair * C + entry, mask=entry < count, other=M)
        # only the program with the entry after the list checks for the newest page
        if (count > 0) & (first <= count) & (count < first + BLOCK):
            missing = not lists(ids_ptr + pair * C, count, newest, STEPS)
            appended = (entry == count) & missing
            page = tl.where(appended, newest, page)
    if HAS_DENSE:
        dense = tl.load(dense_ptr + pair) != 0
        page = tl.where(dense, tl.where(entry <= newest, entry, M), page)
        appended &= not dense

    token = tl.arange(0, TOKENS)[None, :]
    read = (page < M)[:, None] & (token < P)
    at = entry[:, None] * P + token
    attended = read
    if BY_SLOT:
        at = page[:, None] * P + token
        attended &= (at < length) & ((at == length - 1) | ~appended[:, None])
    x = tl.load(logits_ptr + pair * SLOTS + at, mask=attended, other=float("-inf"))
    if PAGE_MASS:
        top = tl.max(x, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.log(tl.sum(tl.exp(x - top[:, None]), 1)) + top
        tl.store(out_ptr + pair * M + page, mass, mask=page < M)
    else:
        tl.store(out_ptr + (pair * M + page)[:, None] * P + token, x, mask=read)
