"""Implements `api.threshold_select` with jax-triton, in one launch.

A thread block searches each row for its threshold and writes the selected units as bits. The last
block of a KV head to finish unites the bits of the group's rows, cuts the union to the capacity if
needed, and lists it. If a head has only one row and it is long, several blocks share it, each with
its part in registers; they synchronise after every pass, and each adds up the results of all.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int32

from jsparse.pallas_kernels.threshold_select.rules import Always, Budget, Rule
from jsparse.pallas_kernels.threshold_select.triton_bits import (
    list_entries,
    number_of,
    unite,
)
from jsparse.pallas_kernels.threshold_select.triton_plan import (
    Lists,
    SelectTiling,
    searched_row,
    shared_row,
)
from jsparse.pallas_kernels.threshold_select.triton_pool import pool, pool_share, sum_pages
from jsparse.pallas_kernels.threshold_select.triton_search import choose
from jsparse.pallas_kernels.threshold_select.triton_share import Share, post, posted, sum_before
from jsparse.pallas_kernels.threshold_select.triton_tiles import take
from jsparse.pallas_kernels.triton_meeting import meet
from jsparse.selection import Selection
from jsparse.shapes import Lengths


def threshold_select(
    scores: Float[Array, "B K G n"],
    rule: Rule,
    *,
    capacity: int,
    granularity: str,
    page_size: int,
    weights: str,
    group: str,
    lengths: Lengths | None,
    names: Int32[Array, "B K m"] | None,
    always: Always | None,
    tiling: SelectTiling | None = None,
) -> Selection:
    """Implements `api.threshold_select` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, heads, members, scored = scores.shape
    setting, sizes = rule[0], rule.sizes if isinstance(rule, Budget) else None
    static = isinstance(setting, int | float)
    by_mass, pooled = granularity == "page_mass", group == "max" and members > 1
    row = searched_row(
        rule,
        scored // page_size if by_mass else scored,
        scored,
        softmax=weights == "softmax",
        normalised=pooled,
        always=always,
        tiling=tiling or SelectTiling(),
    )
    # no list can be too long: there are no more units, or one row selects, and the kernel limits
    # its k to the capacity
    once = pooled or members == 1
    fits = capacity >= row.size or (row.rule == "top_k" and once)
    if fits and once and not by_mass and row.rule in ("top_k", "top_p"):
        row = shared_row(row, batch * heads, members, tiling or SelectTiling())
    by_score = {"rule": "top_k", "value": None, "softmax": False, "normalised": False}
    plan = Lists(
        row=row,
        cap=None if fits else replace(row, **by_score),
        group=members,
        sharing=1 if sizes is None else heads // sizes.shape[1],
        pooled=pooled,
        by_mass=by_mass,
        page_size=page_size,
        capacity=capacity,
        with_lengths=lengths is not None,
        names=0 if names is None else names.shape[-1],
    )
    outputs = (
        jax.ShapeDtypeStruct((batch, heads, capacity), jnp.int32),  # ids
        jax.ShapeDtypeStruct((batch, heads), jnp.int32),  # count
        # from here on, scratch memory of the kernel: bitmaps, floats, finished rows
        jax.ShapeDtypeStruct((batch * heads, plan.words), jnp.uint32),
        jax.ShapeDtypeStruct((batch * heads, max(plan.floats, 1)), jnp.float32),
        jax.ShapeDtypeStruct((batch * heads,), jnp.int32),
    )
    alone = row.parts == 1
    ids, count, *_ = triton_call(
        scores,
        scores if static else setting,  # scores are a placeholder for missing arrays
        scores if sizes is None else sizes,
        scores if lengths is None else lengths,
        scores if names is None else names,
        scores if always is None else always.lengths,
        kernel=select_kernel if alone else select_shared_kernel,
        out_shape=outputs,
        grid=(batch * heads * plan.rows * row.parts,),
        num_warps=plan.row.threads // 32,
        num_stages=1,
        zeroed_outputs=() if alone and plan.rows == 1 else (len(outputs) - 1,),
        plan=plan,
    )
    return Selection(ids, count, granularity="token" if granularity == "token" else "page")


@triton.jit
def select_kernel(
    scores,  # [B, K, G, n]
    settings,  # [B, K]
    sizes,  # [B, K / plan.sharing, n], read if plan.row.sized
    lengths,  # [B, K]
    names,  # [B, K, m]
    held,  # [B, K], read if plan.row.unit
    ids,  # [B, K, C]
    count,  # [B, K]
    bitmaps,  # [B · K, plan.words]
    floats,  # [B · K, plan.floats], or [B · K, 1] if none are needed
    arrived,  # [B · K], zeros if a head has several rows
    plan: tl.constexpr,
):
    """Searches one row, as program head · rows + row; the last of a head also writes its list."""
    ROW: tl.constexpr = plan.row
    head = tl.program_id(0) // plan.rows
    g = tl.program_id(0) % plan.rows
    length, setting = asked(lengths, settings, head, plan)
    wide = head.to(tl.int64)
    row = scores + (wide * plan.group + g) * plan.scores
    sizes += wide // plan.sharing * plan.row.size
    floats += wide * plan.floats
    bitmaps += wide * plan.words
    if plan.by_mass:  # all of the group's rows if they are pooled, else the program's own
        for r in range(plan.group // plan.rows):
            sum_pages(row + r * plan.scores, floats + (g + r) * plan.row.size, length, plan)
        tl.debug_barrier()
        row = floats + g * plan.row.size
        length = tl.cdiv(length, plan.page_size)
    if plan.pooled:
        pool(row, length, None, floats + plan.pooled_at, plan.group, plan)
        tl.debug_barrier()
        row = floats + plan.pooled_at
    words = bitmaps + 2 * g * plan.row.words
    searched = take(row, sizes, length, words, Share(0, row, row), held + head, ROW)
    choose(searched, words, setting, 0, ROW)
    last = True
    if plan.rows > 1:
        # release this row's bitmap, acquire those of the rows that finished before
        last = tl.atomic_add(arrived + head, 1, sem="acq_rel") == plan.rows - 1
    if last:
        rows, names = row - g * plan.row.size, names + wide * plan.names
        ids += wide * plan.capacity
        write_list(rows, bitmaps, floats, length, names, ids, count + head, plan)


@triton.jit
def asked(lengths, settings, head, plan: tl.constexpr):
    """Returns a head's number of valid scores, and its rule's number."""
    length = tl.full([], plan.scores, tl.int32)
    if plan.with_lengths:
        length = tl.minimum(tl.maximum(tl.load(lengths + head), 0), plan.scores)
    setting = (
        tl.load(settings + head).to(tl.float32)
        if plan.row.value is None
        else tl.full([], plan.row.value, tl.float32)
    )
    if plan.row.rule == "top_k":
        # units beyond a row's C best are never listed
        setting = tl.minimum(setting, plan.capacity)
    return length, setting


@triton.jit
def select_shared_kernel(
    scores,  # [B, K, G, n]; several rows of a head become one
    settings,  # [B, K]
    sizes,  # not read
    lengths,  # [B, K]
    names,  # [B, K, m]
    held,  # [B, K], read if plan.row.unit
    ids,  # [B, K, C]
    count,  # [B, K]
    bitmaps,  # [B · K, plan.words]
    floats,  # [B · K, plan.floats]
    arrived,  # [B · K], zeros
    plan: tl.constexpr,
):
    """Searches a part of a head's row, as program head · parts + part, and lists the selection."""
    ROW: tl.constexpr = plan.row
    PARTS: tl.constexpr = plan.row.parts
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    length, setting = asked(lengths, settings, head, plan)
    wide = head.to(tl.int64)
    scores += wide * plan.group * plan.scores
    words = bitmaps + wide * plan.words
    begin = part * plan.row.tile
    share = Share(begin, floats + wide * plan.floats, arrived + head)
    row, met = take(scores, scores, length, words + plan.cap_word, share, held + head, ROW), 0
    if plan.pooled:
        row, met = pool_share(row, plan.group, met, ROW)
    met = choose(row, words, setting, met, ROW)
    end = tl.minimum(length, begin + plan.row.tile)
    post(row, met, 0, number_of(words, begin, end, ROW).to(tl.float32), ROW)
    meet(share.arrived, met, PARTS)
    numbers = posted(row, met, 0, ROW)
    earlier, total = sum_before(numbers, ROW).to(tl.int32), tl.sum(numbers, 0).to(tl.int32)
    ids, names = ids + wide * plan.capacity, names + wide * plan.names
    list_entries(words, begin, end, earlier, names, ids, plan.capacity, plan.shift, ROW)
    if part == 0:
        tl.store(count + head, total)
    for start in range(part * 4 * ROW.threads, plan.capacity, PARTS * 4 * ROW.threads):
        slot = start + tl.arange(0, 4 * ROW.threads)
        tl.store(ids + slot, slot * 0, mask=(slot >= total) & (slot < plan.capacity))


@triton.jit
def write_list(
    rows,  # [rows, row.size]: the searched rows
    bitmaps,  # [plan.words]
    floats,  # [plan.floats]
    length,
    names,  # [m]
    ids,  # [C]
    count,  # []
    plan: tl.constexpr,
):
    """Writes one head's list from the bitmaps of its rows, with 0 past its end.

    The bitmaps are united, and the list is cut to the capacity if it is too long.
    """
    ROW: tl.constexpr = plan.row
    CAPACITY: tl.constexpr = plan.capacity
    if plan.rows > 1:
        unite(bitmaps, length, plan)
        tl.debug_barrier()
    none = length * 0
    total = list_entries(bitmaps, 0, length, none, names, ids, CAPACITY, plan.shift, ROW)
    if plan.cap is not None:
        CAP: tl.constexpr = plan.cap
        # too long: search for the best units by each unit's best score, and list those
        if total > CAPACITY:
            best = floats + plan.cap_at
            kept = bitmaps + plan.cap_word
            pool(rows, length, bitmaps, best, plan.rows, plan)
            tl.debug_barrier()
            every, limit = (
                tl.full([], ROW.size, tl.int32),
                tl.full([], CAPACITY, tl.float32),
            )
            # it has no sizes
            units = take(best, best, every, kept, Share(0, best, best), None, CAP)
            choose(units, kept, limit, 0, CAP)
            total = list_entries(kept, 0, length, none, names, ids, CAPACITY, plan.shift, ROW)
    tl.store(count, total)
    for start in range(0, CAPACITY, 4 * ROW.threads):
        slot = start + tl.arange(0, 4 * ROW.threads)
        tl.store(ids + slot, slot * 0, mask=(slot >= total) & (slot < CAPACITY))
