"""Computes rows from rows: masses of pages, and the best score of each entry.

`plan` is Lists, and a SearchedRow in `log_sum` and `pool_share`.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_share import Share, post, posted
from jsparse.pallas_kernels.threshold_select.triton_tiles import (
    LOG2_E,
    NOTHING,
    changed,
    exp2,
    in_thread,
    log2,
    read,
    row_weight,
    take,
    thread_top,
    weigh,
    with_top,
)
from jsparse.pallas_kernels.triton_meeting import meet


@triton.jit
def log_sum(scores, length, plan: tl.constexpr):
    """Returns the logsumexp of a row in memory, which is not shared; 0 if it has no scores."""
    row = take(scores, scores, length, scores, Share(0, scores, scores), None, plan)
    row, met = with_top(row, 0, plan)
    weight, met = row_weight(row, met, plan)
    return tl.where(weight > 0, row.top + log2(weight) / LOG2_E, 0.0)


@triton.jit
def pool_share(row, GROUP: tl.constexpr, met, plan: tl.constexpr):
    """Returns the row pooled with those that follow it, as in `pool`, and the number of meetings.

    The programs exchange the largest logit and the weight of each of their rows.
    """
    SIZE: tl.constexpr = plan.size
    if plan.softmax:
        for g in range(GROUP):
            x = read(row.scores + g * SIZE, row.share.begin, row.length, plan)
            top = tl.max(thread_top(x), 0)
            some = tl.where(top == NOTHING, 0.0, top)
            post(row, met, 2 * g, top, plan)
            post(row, met, 2 * g + 1, tl.sum(in_thread(weigh(x, some, plan)[0]), 0), plan)
        meet(row.share.arrived, met, plan.parts)
    best = tl.full([plan.threads, plan.runs, 4], NOTHING, tl.float32)
    for g in range(GROUP):
        offset = 0.0
        if plan.softmax:
            tops, weights = posted(row, met, 2 * g, plan), posted(row, met, 2 * g + 1, plan)
            top = tl.max(tops, 0)
            some = tl.where(top == NOTHING, 0.0, top)
            scale = tl.where(tops == NOTHING, 0.0, exp2((tops - some) * LOG2_E))
            weight = tl.sum(weights * scale, 0)
            offset = tl.where(weight > 0, some + log2(weight) / LOG2_E, 0.0)
        x = read(row.scores + g * SIZE, row.share.begin, row.length, plan)
        best = tl.maximum(best, x - offset)
    if plan.softmax:
        met += 1
    return changed(row, best, 0.0, row.top, row.first), met


@triton.jit
def sum_pages(scores, pages, length, plan: tl.constexpr):
    """Writes the mass of each page of a row: the logsumexp of its logits or the sum of its weights.

    The mass of a page without scores is -inf.
    """
    P: tl.constexpr = plan.page_size
    AT_ONCE: tl.constexpr = plan.pages_at_once
    t = tl.arange(0, P)[None, :]
    for start in range(0, plan.row.size, AT_ONCE):
        page = start + tl.arange(0, AT_ONCE)[:, None]
        # whole runs of four are loaded, so that loads stay wide
        score = tl.load(
            scores + page * P + t, mask=page * P + t // 4 * 4 < length, other=NOTHING
        ).to(tl.float32)
        score = tl.where((page * P + t < length) & (score == score), score, NOTHING)  # nor NaN
        top = tl.max(score, 1)
        if plan.row.softmax:
            some = tl.where(top == NOTHING, 0.0, top)
            mass = some + log2(tl.sum(exp2((score - some[:, None]) * LOG2_E), 1)) / LOG2_E
        else:
            mass = tl.sum(tl.where(score > NOTHING, score, 0.0), 1)
        mass = tl.where(top == NOTHING, NOTHING, mass)
        page = start + tl.arange(0, AT_ONCE)
        tl.store(pages + page, mass, mask=page < plan.row.size)


@triton.jit
def pool(
    rows,  # [ROWS, plan.row.size]
    length,
    members,  # the bitmap of entries, or None
    pooled,  # [plan.row.size]
    ROWS: tl.constexpr,
    plan: tl.constexpr,
):
    """Writes the largest score of each entry in `ROWS` rows.

    Logits of several rows are compared as logarithms of normalised weights. Entries that `members`
    does not list get -inf (None: all count).
    """
    AT_ONCE: tl.constexpr = 16 * plan.row.threads
    ROW: tl.constexpr = plan.row
    offsets = ()
    for g in tl.static_range(ROWS):
        if plan.row.softmax and ROWS > 1:
            offsets += (log_sum(rows + g * plan.row.size, length, ROW),)
        else:
            offsets += (0.0,)
    for start in range(0, plan.row.size, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        best = tl.full([AT_ONCE], NOTHING, tl.float32)
        inside = (entry < plan.row.size) & (entry < length)
        if members is not None:
            word = tl.load(members + entry // 32, mask=inside, other=0)
            inside &= (word >> (entry % 32).to(tl.uint32)) & 1 == 1
        for g in tl.static_range(ROWS):
            at = rows + g * plan.row.size + entry
            score = tl.load(at, mask=inside, other=NOTHING).to(tl.float32)
            best = tl.maximum(best, score - offsets[g])
        tl.store(pooled + entry, best, mask=entry < plan.row.size)
