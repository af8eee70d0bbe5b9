"""jax-triton: a program a block of pages, each of which searches the list for itself.

Every page is written once, by one program, and read from where it was found.
"""

# Where triton is not installed, pyright takes this very file for it.
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float32

from jsparse.partials import StatsKind
from jsparse.selection import Selection
from jsparse.shapes import Lengths

TILE = 4096  # logits of a program
MAX_WARPS = 4


def place_logits(
    logits: Float32[Array, "pairs slots"],
    selection: Selection,
    lengths: Lengths,
    *,
    stats: StatsKind,
    num_pages: int,
    page_size: int,
) -> Float32[Array, "B K units"]:
    """See api."""
    from jsparse.pallas_kernels.triton_call import triton_call

    units = num_pages if stats == "page_mass" else num_pages * page_size
    if logits.size == 0:
        return jnp.full((*lengths.shape, units), -jnp.inf, jnp.float32)
    capacity, dense = selection.ids.shape[-1], selection.dense
    tokens = triton.next_power_of_2(page_size)
    block = min(max(TILE // tokens, 1), triton.next_power_of_2(num_pages))
    return triton_call(
        *(logits, lengths, selection.count),
        selection.ids if capacity else lengths,  # without a list, or dense heads, never read
        lengths if dense is None else dense,
        kernel=place_kernel,
        out_shape=jax.ShapeDtypeStruct((*lengths.shape, units), jnp.float32),
        grid=(triton.cdiv(num_pages, block), lengths.size),
        num_warps=min(max(block // 32, 1), MAX_WARPS),  # no more threads than pages, or they search alike
        SLOTS=logits.shape[1],
        C=capacity,
        STEPS=capacity.bit_length(),
        M=num_pages,
        P=page_size,
        BLOCK=block,
        TOKENS=tokens,
        HAS_DENSE=dense is not None,
        PAGE_MASS=stats == "page_mass",
    )


@triton.jit
def place_kernel(
    logits_ptr,  # [pairs, SLOTS]
    lengths_ptr,
    count_ptr,
    ids_ptr,  # [pairs, C]
    dense_ptr,
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
):
    """BLOCK pages of one head."""
    pair = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, TOKENS)[None, :]
    length = tl.load(lengths_ptr + pair)
    newest = tl.cdiv(length, P) - 1  # -1 where nothing is held
    count = tl.where(length > 0, tl.load(count_ptr + pair), 0)

    # the last entry whose page is not beyond this one, and that page
    entry = tl.full([BLOCK], -1, tl.int32)
    found = entry
    for step in tl.static_range(STEPS):
        ahead = entry + (1 << (STEPS - 1 - step))
        listed = tl.load(ids_ptr + pair * C + ahead, mask=ahead < count, other=2147483647)
        entry = tl.where(listed <= page, ahead, entry)
        found = tl.where(listed <= page, listed, found)
    missing = (page == newest) & (found != page) & (count > 0)
    entry = tl.where(missing, count, entry)
    read = (found == page) | missing
    if HAS_DENSE:
        dense = tl.load(dense_ptr + pair) != 0
        entry = tl.where(dense, page, entry)
        read = tl.where(dense, page <= newest, read)

    inside = (page < M)[:, None] & (token < P)
    at = logits_ptr + pair * SLOTS + entry[:, None] * P + token
    x = tl.load(at, mask=inside & read[:, None], other=float("-inf"))
    if PAGE_MASS:
        top = tl.max(x, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.log(tl.sum(tl.exp(x - top[:, None]), 1)) + top
        tl.store(out_ptr + pair * M + page, mass, mask=page < M)
    else:
        tl.store(out_ptr + (pair * M + page)[:, None] * P + token, x, mask=inside)
