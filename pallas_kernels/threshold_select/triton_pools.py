"""Makes rows from rows, in memory: of pages from their tokens, of a group from its members.

`plan` is the Lists of triton_kernel.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_rows import log_sum
from jsparse.pallas_kernels.threshold_select.triton_tiles import LOG2_E, NOTHING, exp2, log2


@triton.jit
def sum_pages(
    row,  # [plan.scores]
    pages,  # [plan.units]
    length,
    plan: tl.constexpr,
):
    """Write the mass of each page: the logsumexp of its logits, or the sum of its weights.

    The mass of a page without scores is -inf.
    """
    P: tl.constexpr = plan.page_size
    AT_ONCE: tl.constexpr = plan.pages_at_once
    t = tl.arange(0, P)[None, :]
    for start in range(0, plan.units, AT_ONCE):
        page = start + tl.arange(0, AT_ONCE)[:, None]
        # whole runs of four are loaded, so that loads stay wide
        score = tl.load(row + page * P + t, mask=page * P + t // 4 * 4 < length, other=NOTHING).to(
            tl.float32
        )
        score = tl.where((page * P + t < length) & (score == score), score, NOTHING)  # nor NaN
        top = tl.max(score, 1)
        if plan.row.softmax:
            some = tl.where(top == NOTHING, 0.0, top)
            mass = some + log2(tl.sum(exp2((score - some[:, None]) * LOG2_E), 1)) / LOG2_E
        else:
            mass = tl.sum(tl.where(score > NOTHING, score, 0.0), 1)
        mass = tl.where(top == NOTHING, NOTHING, mass)
        page = start + tl.arange(0, AT_ONCE)
        tl.store(pages + page, mass, mask=page < plan.units)


@triton.jit
def pool(
    rows,  # [ROWS, plan.row.size]
    length,
    members,  # the bitmap of entries, or None
    pooled,  # [UNITS]
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    plan: tl.constexpr,
):
    """Write the largest score of each unit among its `SIZE` entries in `ROWS` rows.

    Logits of several rows are compared as logarithms of normalised weights. Entries that `members`
    does not list do not count (None: all do); a unit without any gets -inf.
    """
    AT_ONCE: tl.constexpr = 4 * plan.row.threads
    ROW: tl.constexpr = plan.row
    for g in range(ROWS):
        row = rows + g * plan.row.size
        offset = 0.0
        if plan.row.softmax and ROWS > 1:
            offset = log_sum(row, length, ROW)
        for start in range(0, UNITS, AT_ONCE):
            unit = start + tl.arange(0, AT_ONCE)
            best = tl.load(pooled + unit, mask=(unit < UNITS) & (g > 0), other=NOTHING)
            for t in range(SIZE):
                entry = unit * SIZE + t
                inside = (unit < UNITS) & (entry < length)
                if members is not None:
                    word = tl.load(members + entry // 32, mask=inside, other=0)
                    inside &= (word >> (entry % 32).to(tl.uint32)) & 1 == 1
                score = tl.load(row + entry, mask=inside, other=NOTHING).to(tl.float32)
                best = tl.maximum(best, score - offset)
            tl.store(pooled + unit, best, mask=unit < UNITS)
