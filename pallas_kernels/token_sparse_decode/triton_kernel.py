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
    count_own,
    find,
    first_units,
    own_unit,
    unit_size,
)
from jsparse.pallas_kernels.token_sparse_decode.triton_reports import (
    Report,
    end_report,
    store_by_slot,
    store_listed,
)
from jsparse.pallas_kernels.token_sparse_decode.triton_tiers import Pools, first_own_page, place

LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 takes fewer instructions than exp
# Byte n of two words (pack=2) becomes register n. With a byte's lower 7 bits as its mantissa,
# 0x4300 is 128 + them; with its sign as the lowest bit of the exponent, 128 or 256. The first less
# the second is the number.
WIDEN = tl.constexpr(
    "{ .reg .b32 byte, part, sign, minus; mov.b32 minus, 0xbf80bf80;"
    + "".join(
        f"prmt.b32 byte, $4, $5, 0x{4 + n}{4 + n}{n}{n};"
        "lop3.b32 part, byte, 0x007f007f, 0x43004300, 0xea;"
        "lop3.b32 sign, byte, 0x00800080, 0x43004300, 0xea;"
        f"fma.rn.bf16x2 ${n}, sign, minus, part;"
        for n in range(4)
    )
    + "}"
)


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
    o: Any  # planes of [mma_rows, cols / planes], of V by these weights; rows repeat


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
    _,  # of the mean query's report on tokens: an alias of scores_ptr, filled with -inf
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
    sizes = unit_size(all_entries, plan)
    used = tl.cdiv(all_entries, sizes)
    tl.store(used_ptr + everyone, used, mask=(everyone < pairs) & (tl.program_id(0) == 0))
    if plan.listed:
        for pair in range(tl.program_id(0), pairs, tl.num_programs(0)):
            entries, listed = count_entries(heads, pair, pair < pairs, plan)
            if (entries == 0) | (listed < 0):
                line = tl.full([], capacity + 1, tl.int64) * pair
                end_report(report, heads, pair, line, 0, plan)
    firsts, units = first_units(used, sizes > plan.block * plan.unit_blocks)
    for number in range(count_own(units)):
        unit = own_unit(number)
        own = (firsts <= unit) & (unit < firsts + used)
        pair = tl.sum(tl.where(own, everyone, 0), 0)
        split = unit - tl.sum(tl.where(own, firsts, 0), 0)
        entries, listed = count_entries(heads, pair, pair < pairs, plan)
        newest = tl.load(lengths_ptr + pair) - 1
        head = HeadScalars(pair, entries, listed, newest, pair.to(tl.int64) * (capacity + 1))
        sums = attend(heads, pools, given, report, axes, head, split, plan)
        part = (pair.to(tl.int64) * splits + split) * (plan.group + plan.mean)
        store_part(sums, axes, o_ptr, lse_ptr, part, plan)


@triton.jit
def attend(heads, pools, given, report, axes, head, split, plan: tl.constexpr):
    """Returns the sums of one unit of a head, and reports its blocks' logits."""
    own_first = first_own_page(pools, head.pair)
    size = unit_size(head.entries, plan)
    first = split * size
    q = queries(given, axes, head, plan)  # independent loads precede dependent ones
    reach = load_reach(pools, axes, head, plan)
    slot, at, valid = find(heads, head, first + axes.offset, plan)
    scales = load_scales(pools, head, own_first, slot, at, valid, plan)
    if plan.int8:
        q = integers(q, reach, plan)
    sums = no_sums(plan)
    for start in range(first, tl.minimum(first + size, head.entries), plan.block):
        # found a block ahead, so that the dependent loads of K and V overlap with the arithmetic
        entries_ahead = start + plan.block + axes.offset
        slot_ahead, at_ahead, valid_ahead = find(heads, head, entries_ahead, plan)
        scales_ahead = load_scales(pools, head, own_first, slot_ahead, at_ahead, valid_ahead, plan)
        if given.known is not None:
            lines = given.known + head.line * plan.group + axes.row * (heads.capacity + 1)
            lines += (start + axes.offset)[None, :]
            own = valid[None, :] & (axes.row < plan.group)
            logits = tl.load(lines, mask=own, other=0.0)
        else:
            H: tl.constexpr = plan.head_dim
            at_k = place(pools.k, pools.ring_k, pools.own_k, H, head, own_first, slot, at, plan)
            k = load_rows(pools.k, at_k, axes.col, H, valid, plan)
            logits = multiply(q, k, scales, plan)
        v = load_values(pools, axes, head, own_first, slot, at, valid, plan)
        if given.bias is not None:
            logits += tl.load(given.bias + at, mask=valid, other=0.0)[None, :]
        if plan.mean:
            store_by_slot(report, heads, axes, head, start, slot, valid, logits, plan)
        if plan.listed:
            store_listed(report, heads, axes, head, start, slot, valid, logits, plan)
        sums = add_block(sums, logits, valid, v, scales, plan)
        slot, at, valid, scales = slot_ahead, at_ahead, valid_ahead, scales_ahead
    return sums


@triton.jit
def load_scales(pools, head, own_first, slot, at, valid, plan: tl.constexpr):
    """Loads the scales of K and V of a block; without scales, returns `valid` as placeholders."""
    of_k, of_v = valid, valid
    if plan.int8:
        scales, ring, own = pools.k_scales, pools.ring_k_scales, pools.own_k_scales
        at_k = place(scales, ring, own, 1, head, own_first, slot, at, plan)
        of_k = tl.load(scales + at_k, mask=valid, other=0)
        scales, ring, own = pools.v_scales, pools.ring_v_scales, pools.own_v_scales
        at_v = place(scales, ring, own, 1, head, own_first, slot, at, plan)
        of_v = tl.load(scales + at_v, mask=valid, other=0)
    return of_k, of_v


@triton.jit
def queries(given, axes, head, plan: tl.constexpr):
    """Loads the rows of a group's queries, preceded by their mean if its logits are requested.

    The mean is rounded to their type, as an operand. For K in 8 bits, the rows repeat once.
    """
    row, col = axes.row, axes.col
    if plan.int8:
        row = tl.arange(0, 2 * plan.rows)[:, None] % plan.rows
    own = (row >= plan.mean) & (row < plan.mean + plan.group) & (col < plan.head_dim)
    first = (head.pair * plan.group + row - plan.mean) * plan.head_dim
    q = tl.load(given.q + first + col, mask=own, other=0.0)
    if plan.mean:
        mean = tl.sum(q.to(tl.float32), 0) / (plan.group * (q.shape[0] // plan.rows))
        q = tl.where(row == 0, mean.to(q.dtype)[None, :], q)
    return q


@triton.jit
def load_reach(pools, axes, head, plan: tl.constexpr):
    """Loads the reach of a head's channels [1, cols], 1 if there is none."""
    reach = tl.full([1, plan.cols], 1.0, tl.float32)
    if pools.reach is not None:
        first = pools.reach + head.pair % plan.heads * plan.head_dim
        reach = tl.load(first + axes.col, mask=axes.col < plan.head_dim, other=0.0)
    return reach


@triton.jit
def integers(q, reach, plan: tl.constexpr):
    """Returns queries for integer keys, in 15 bits, and the scale of each.

    Of a query's two rows, the first gets the upper 8 bits and the second the lower, so that one MMA
    multiplies both by K.
    """
    R: tl.constexpr = plan.rows
    q = q.to(tl.float32) * (reach * plan.scale)
    largest = tl.max(tl.abs(q), 1)
    scale = tl.where(largest > 0, largest * (1 / (127 * 256)), 1.0)
    whole = tl.floor(q / scale[:, None] + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    upper = tl.arange(0, 2 * R)[:, None] < R
    of_both = tl.where(upper, high, whole - high * 256).to(tl.int8)
    return of_both, tl.max(tl.reshape(scale, [2, R]), 0)


@triton.jit
def multiply(q, k, scales, plan: tl.constexpr):
    """Returns the logits of a block of keys."""
    if plan.int8:
        of_both, q_scale = q
        of_k, _of_v = scales
        halves = tl.reshape(tl.dot(of_both, tl.trans(k)), [2, plan.rows, plan.block])
        weight = tl.where(tl.arange(0, 2) == 0, 256, 1)
        whole = tl.sum(halves * weight[:, None, None], 0).to(tl.float32)
        logits = whole * q_scale[:, None] * of_k.to(tl.float32)[None, :]
    else:
        logits = tl.dot(q, tl.trans(k), input_precision=plan.precision) * plan.scale
    return logits


@triton.jit
def load_values(pools, axes, head, own_first, slot, at, valid, plan: tl.constexpr):
    """Loads a block of V: [block, cols], or if in 8 bits [block, cols / 4] words of 4 channels."""
    own, ring = pools.own_v, pools.ring_v
    base, col = pools.v, axes.col
    W: tl.constexpr = plan.head_dim // 4 if plan.int8 else plan.head_dim
    if plan.int8:
        base = pools.v.to(tl.pointer_type(tl.int32), bitcast=True)
        col = tl.arange(0, plan.cols // 4)[None, :]
    at_v = place(base, ring, own, W, head, own_first, slot, at, plan)
    return load_rows(base, at_v, col, W, valid, plan)


@triton.jit
def load_rows(base, start, col, W: tl.constexpr, valid, plan: tl.constexpr):
    """Loads a block of rows of W elements that start there."""
    inside = col < W
    if plan.int8 and plan.ring == 0:
        # any integer is finite and gets no weight: one mask less per load
        start = tl.where(valid, start, 0)
    else:
        inside = inside & valid[:, None]
    return tl.load(base + start[:, None] + col, mask=inside, other=0)


@triton.jit
def add_block(sums, logits, valid, v, scales, plan: tl.constexpr):
    """Adds a block of tokens to the sums of a unit."""
    minus_inf = float("-inf")
    logits = tl.where(valid[None, :], logits, minus_inf)
    higher = tl.maximum(sums.top, tl.max(logits, 1))
    base = tl.where(higher == minus_inf, 0.0, higher)  # -inf - -inf would be NaN
    weights = tl.exp2((logits - base[:, None]) * LOG2_E)
    shrink = tl.exp2((sums.top - base) * LOG2_E)
    total = sums.total * shrink + tl.sum(weights, 1)
    of_rows = repeated(shrink[:, None], plan)
    if plan.int8:
        _of_k, of_v = scales
        weights *= of_v.to(tl.float32)[None, :]
        weights = repeated(weights if plan.wide else weights.to(tl.bfloat16), plan)
        v_a, v_b, v_c, v_d = float32s(v) if plan.wide else bfloat16s(v)
        a, b, c, d = sums.o
        a = tl.dot(weights, v_a, a * of_rows, input_precision=plan.precision)
        b = tl.dot(weights, v_b, b * of_rows, input_precision=plan.precision)
        c = tl.dot(weights, v_c, c * of_rows, input_precision=plan.precision)
        d = tl.dot(weights, v_d, d * of_rows, input_precision=plan.precision)
        o = a, b, c, d
    else:
        (o,) = sums.o
        o = (tl.dot(weights.to(v.dtype), v, o * of_rows, input_precision=plan.precision),)
    return UnitSums(higher, total, o)


@triton.jit
def no_sums(plan: tl.constexpr):
    """Returns the sums of no block."""
    top = tl.full([plan.rows], float("-inf"), tl.float32)
    total = tl.full([plan.rows], 0.0, tl.float32)
    if plan.int8:
        plane = tl.full([plan.mma_rows, plan.cols // 4], 0.0, tl.float32)
        o = plane, plane, plane, plane
    else:
        o = (tl.full([plan.rows, plan.cols], 0.0, tl.float32),)
    return UnitSums(top, total, o)


@triton.jit
def repeated(x, plan: tl.constexpr):
    """Repeats rows until they fill an MMA."""
    if plan.rows < plan.mma_rows:
        TIMES: tl.constexpr = plan.mma_rows // plan.rows
        x = tl.broadcast_to(x[None], [TIMES, plan.rows, x.shape[1]])
        x = tl.reshape(x, [plan.mma_rows, x.shape[2]])
    return x


@triton.jit
def bfloat16s(words):
    """Returns the four signed bytes of words as four arrays of bfloat16, lowest first."""
    return tl.inline_asm_elementwise(
        WIDEN,
        constraints="=&r,=&r,=&r,=&r,r,r",
        args=[words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def float32s(words):
    """Returns the four signed bytes of words as four arrays of float32, lowest first."""
    a, b, c = (words << 24) >> 24, (words << 16) >> 24, (words << 8) >> 24
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), (words >> 24).to(tl.float32)


@triton.jit
def store_part(sums, axes, o_ptr, lse_ptr, part, plan: tl.constexpr):
    """Stores a unit's o and lse; `part` is the first of its rows."""
    rows: tl.constexpr = plan.group + plan.mean
    if plan.int8:
        a, b, c, d = sums.o
        by_word = tl.join(tl.join(a, c), tl.join(b, d))
        o = tl.reshape(by_word, [plan.mma_rows, plan.cols])
    else:
        (o,) = sums.o
    o /= repeated(tl.where(sums.total == 0, 1.0, sums.total)[:, None], plan)
    row = tl.arange(0, plan.mma_rows)[:, None]
    inside = (row < rows) & (axes.col < plan.head_dim)
    tl.store(o_ptr + (part + row) * plan.head_dim + axes.col, o, mask=inside)
    line = tl.arange(0, plan.rows)
    tl.store(lse_ptr + part + line, sums.top + tl.log(sums.total), mask=line < rows)
