"""The kernel: programs find their units of all heads' lists, and attend to each.

`plan` is the LaunchPlan of triton_gpu.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jsparse.pallas_kernels.token_sparse_decode.triton_lists import (
    HeadArrays,
    HeadScalars,
    count_entries,
    find,
    unit_size,
)
from jsparse.pallas_kernels.token_sparse_decode.triton_reports import (
    Report,
    end_report,
    store_by_slot,
    store_listed,
)
from jsparse.pallas_kernels.token_sparse_decode.triton_tiers import Pools, first_own_page, place


class LogitInputs(NamedTuple):
    """The inputs of logits except K; None for missing arrays."""

    q: Any  # [B, N, H]
    bias: Any  # [pool pages, P]
    known: Any  # [pairs, G, capacity + 1], logits of the lists and the newest token


class Axes(NamedTuple):
    """The indices of a unit's products."""

    row: Any  # [rows, 1], of queries
    col: Any  # [1, cols], of channels
    offset: Any  # [block], of entries


class UnitSums(NamedTuple):
    """The sums of a unit over its blocks."""

    top: Any  # [rows], the largest logit
    total: Any  # [rows], of weights relative to it
    o: Any  # [rows, cols], of V by these weights


@triton.jit
def attend_kernel(
    q_ptr,  # [B, N, H]
    k_ptr,  # [pool pages, P, H]
    v_ptr,  # [pool pages, P, H]
    lengths_ptr,  # [B, K]
    count_ptr,  # [B, K]
    dense_ptr,  # [B, K]
    ids_ptr,  # [B, K, capacity]
    bits_ptr,  # [B, K, capacity]
    table_ptr,  # [B, K, pages]
    bias_ptr,  # [pool pages, P]
    _,  # if plan.mean an alias of scores_ptr, filled with -inf
    ring_k_ptr,  # [pairs · ring, P, H], if k_ptr is in host memory
    ring_v_ptr,  # [pairs · ring, P, H]
    own_k_ptr,  # [resident pages, P, H]
    own_v_ptr,  # [resident pages, P, H]
    own_first_ptr,  # [B, K]
    known_ptr,  # [pairs, G, capacity + 1]
    k_scales_ptr,  # [pool pages, P], if K and V are in 8 bits
    v_scales_ptr,  # [pool pages, P]
    ring_k_scales_ptr,  # [pairs · ring, P]
    ring_v_scales_ptr,  # [pairs · ring, P]
    own_k_scales_ptr,  # [resident pages, P]
    own_v_scales_ptr,  # [resident pages, P]
    reach_ptr,  # [K, H]
    pairs,
    capacity,
    pages,  # M, of a head
    splits,
    o_ptr,  # [pairs, splits, mean + G, H]
    lse_ptr,  # [pairs, splits, mean + G]
    used_ptr,  # [pairs]
    scores_ptr,  # [pairs, pages · P] if plan.mean; [pairs, G, capacity + 1] if plan.listed
    named_ptr,  # [pairs, capacity + 1] if plan.listed
    number_ptr,  # [pairs] if plan.listed
    plan: tl.constexpr,
):
    """Computes the partial (o, lse) of every unit, and stores the report."""
    heads = HeadArrays(
        lengths_ptr,
        count_ptr,
        dense_ptr if plan.has_dense else None,
        ids_ptr,
        bits_ptr if plan.has_bits else None,
        table_ptr if plan.has_table else None,
        capacity,
        pages,
    )
    pools = Pools(
        k_ptr,
        v_ptr,
        ring_k_ptr if plan.ring > 0 else None,
        ring_v_ptr if plan.ring > 0 else None,
        own_k_ptr if plan.resident else None,
        own_v_ptr if plan.resident else None,
        own_first_ptr if plan.resident else None,
        k_scales_ptr if plan.int8 else None,
        v_scales_ptr if plan.int8 else None,
        ring_k_scales_ptr if plan.int8 and plan.ring > 0 else None,
        ring_v_scales_ptr if plan.int8 and plan.ring > 0 else None,
        own_k_scales_ptr if plan.int8 and plan.resident else None,
        own_v_scales_ptr if plan.int8 and plan.resident else None,
        reach_ptr if plan.has_reach else None,
    )
    given = LogitInputs(
        q_ptr,
        bias_ptr if plan.has_bias else None,
        known_ptr if plan.known else None,
    )
    report = Report(scores_ptr, named_ptr, number_ptr)
    row, col = tl.arange(0, plan.rows)[:, None], tl.arange(0, plan.cols)[None, :]
    axes = Axes(row, col, tl.arange(0, plan.block))
    everyone = tl.arange(0, plan.pairs)
    all_entries, _listed = count_entries(heads, everyone, everyone < pairs, plan)
    used = tl.cdiv(all_entries, unit_size(all_entries, plan))
    tl.store(used_ptr + everyone, used, mask=(everyone < pairs) & (tl.program_id(0) == 0))
    if plan.listed:
        for pair in range(tl.program_id(0), pairs, tl.num_programs(0)):
            entries, listed = count_entries(heads, pair, pair < pairs, plan)
            if (entries == 0) | (listed < 0):
                line = tl.full([], capacity + 1, tl.int64) * pair
                end_report(report, heads, pair, line, 0, plan)
    ends = tl.cumsum(used, 0)  # units of each head and of all before it
    for unit in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        pair = tl.sum((ends <= unit).to(tl.int32), 0)
        split = unit - tl.max(tl.where(ends <= unit, ends, 0), 0)
        entries, listed = count_entries(heads, pair, pair < pairs, plan)
        newest = tl.load(lengths_ptr + pair) - 1
        head = HeadScalars(pair, entries, listed, newest, pair.to(tl.int64) * (capacity + 1))
        sums = attend(heads, pools, given, report, axes, head, split, plan)
        part = (pair.to(tl.int64) * splits + split) * (plan.group + plan.mean)
        store_part(sums, axes, o_ptr, lse_ptr, part, plan)


@triton.jit
def attend(heads, pools, given, report, axes, head, split, plan: tl.constexpr):
    """Returns the sums of one unit of a head, and reports its blocks' logits."""
    row, col, offset = axes
    own_first = first_own_page(pools, head.pair)
    size = unit_size(head.entries, plan)
    first = split * size
    slot, at, valid = find(heads, head, first + offset, plan)
    q = queries(given, axes, head, plan)
    q_high, q_low, q_scale = integers(q, pools, axes, head, plan) if plan.int8 else (q, q, q)
    sums = UnitSums(
        tl.full([plan.rows], float("-inf"), tl.float32),
        tl.full([plan.rows], 0.0, tl.float32),
        tl.full([plan.rows, plan.cols], 0.0, tl.float32),
    )
    for start in range(first, tl.minimum(first + size, head.entries), plan.block):
        # found a block ahead, so that the dependent loads of K and V overlap with the arithmetic
        ahead = start + plan.block + offset
        slot_ahead, at_ahead, valid_ahead = find(heads, head, ahead, plan)
        inside = valid[:, None] & (col < plan.head_dim)
        H: tl.constexpr = plan.head_dim
        at_k = place(pools.k, pools.ring_k, pools.own_k, H, head, own_first, slot, at, plan)
        at_v = place(pools.v, pools.ring_v, pools.own_v, H, head, own_first, slot, at, plan)
        if given.known is not None:
            lines = given.known + head.line * plan.group + row * (heads.capacity + 1)
            lines += (start + offset)[None, :]
            logits = tl.load(lines, mask=valid[None, :] & (row < plan.group), other=0.0)
        else:
            k = tl.load(pools.k + at_k[:, None] + col, mask=inside, other=0)
            if plan.int8:
                scales, ring, own = pools.k_scales, pools.ring_k_scales, pools.own_k_scales
                at_scale = place(scales, ring, own, 1, head, own_first, slot, at, plan)
                k_scale = tl.load(scales + at_scale, mask=valid, other=0).to(tl.float32)
                k = tl.trans(k)
                sum_high, sum_low = tl.dot(q_high, k), tl.dot(q_low, k)
                whole = sum_high.to(tl.float32) * 256 + sum_low.to(tl.float32)
                logits = whole * q_scale[:, None] * k_scale[None, :]
            else:
                logits = tl.dot(q, tl.trans(k), input_precision=plan.precision) * plan.scale
        v = tl.load(pools.v + at_v[:, None] + col, mask=inside, other=0)
        v_scale = None
        if plan.int8:
            scales, ring, own = pools.v_scales, pools.ring_v_scales, pools.own_v_scales
            at_scale = place(scales, ring, own, 1, head, own_first, slot, at, plan)
            v_scale = tl.load(scales + at_scale, mask=valid, other=0).to(tl.float32)
            v = v.to(tl.float32 if q.dtype == tl.float32 else tl.bfloat16)
        if given.bias is not None:
            logits += tl.load(given.bias + at, mask=valid, other=0.0)[None, :]
        if plan.mean:
            store_by_slot(report, heads, axes, head, slot, valid, logits, plan)
        if plan.listed:
            store_listed(report, heads, axes, head, start, slot, valid, logits, plan)
        sums = add_block(sums, logits, valid, v, v_scale, plan)
        slot, at, valid = slot_ahead, at_ahead, valid_ahead
    return sums


@triton.jit
def queries(given, axes, head, plan: tl.constexpr):
    """Loads the rows of a group's queries, preceded by their mean if its logits are requested.

    The mean is rounded to their type, as an operand.
    """
    row, col = axes.row, axes.col
    own = (row >= plan.mean) & (row < plan.mean + plan.group) & (col < plan.head_dim)
    first = (head.pair * plan.group + row - plan.mean) * plan.head_dim
    q = tl.load(given.q + first + col, mask=own, other=0.0)
    if plan.mean:
        mean = tl.sum(q.to(tl.float32), 0) / plan.group
        q = tl.where(row == 0, mean.to(q.dtype)[None, :], q)
    return q


@triton.jit
def integers(q, pools, axes, head, plan: tl.constexpr):
    """Returns queries for integer keys, in 15 bits: high · 256 + low, times a scale per query."""
    q = q.to(tl.float32) * plan.scale
    if pools.reach is not None:
        first = pools.reach + head.pair % plan.heads * plan.head_dim
        q *= tl.load(first + axes.col, mask=axes.col < plan.head_dim, other=0.0)
    largest = tl.max(tl.abs(q), 1)
    scale = tl.where(largest > 0, largest * (1 / (127 * 256)), 1.0)
    whole = tl.floor(q / scale[:, None] + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    return high.to(tl.int8), (whole - high * 256).to(tl.int8), scale


@triton.jit
def add_block(sums, logits, valid, v, v_scale, plan: tl.constexpr):
    """Adds a block of tokens to the sums of a unit."""
    minus_inf = float("-inf")
    logits = tl.where(valid[None, :], logits, minus_inf)
    higher = tl.maximum(sums.top, tl.max(logits, 1))
    base = tl.where(higher == minus_inf, 0.0, higher)  # -inf - -inf would be NaN
    weights = tl.exp(logits - base[:, None])
    shrink = tl.exp(sums.top - base)
    total = sums.total * shrink + tl.sum(weights, 1)
    if v_scale is not None:
        weights *= v_scale[None, :]
    o = tl.dot(weights.to(v.dtype), v, sums.o * shrink[:, None], input_precision=plan.precision)
    return UnitSums(higher, total, o)


@triton.jit
def store_part(sums, axes, o_ptr, lse_ptr, part, plan: tl.constexpr):
    """Stores a unit's o and lse; `part` is the first of its rows."""
    row, col = axes.row, axes.col
    rows: tl.constexpr = plan.group + plan.mean
    o = sums.o / tl.where(sums.total == 0, 1.0, sums.total)[:, None]
    inside = (row < rows) & (col < plan.head_dim)
    tl.store(o_ptr + (part + row) * plan.head_dim + col, o, mask=inside)
    line = tl.arange(0, plan.rows)
    tl.store(lse_ptr + part + line, sums.top + tl.log(sums.total), mask=line < rows)
