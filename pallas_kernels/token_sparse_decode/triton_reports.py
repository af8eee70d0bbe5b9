"""Stores a call's report: the mean query's logits by slot, or every row's in list order."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jsparse.pallas_kernels.token_sparse_decode.triton_lists import count_older


class Report(NamedTuple):
    """The arrays of a report; missing ones are never written."""

    scores: Any  # [pairs, pages · P] of the mean query, [pairs, G, capacity + 1] of listed tokens
    named: Any  # [pairs, capacity + 1], listed tokens
    number: Any  # [pairs], number of these tokens


@triton.jit
def store_by_slot(report, heads, axes, head, start, slot, valid, logits, plan: tl.constexpr):
    """Stores the logits of the mean query, which is row 0, at the slots of a block.

    Unattended tokens of listed pages get -inf.
    """
    of_mean = tl.sum(tl.where(axes.row == 0, logits, 0.0), 0)
    first = head.pair.to(tl.int64) * heads.pages * plan.page_size
    older = (start + axes.offset < head.entries - 1) & (slot < head.newest)
    of_mean = tl.where(valid, of_mean, float("-inf"))
    tl.store(report.scores + first + slot, of_mean, mask=valid | older)


@triton.jit
def store_listed(report, heads, axes, head, start, slot, valid, logits, plan: tl.constexpr):
    """Stores the tokens of a block and every row's logits.

    The newest token is read after the list but reported directly after the older ones, since lists
    may name it and extend past the head's length.
    """
    row, offset, line = axes.row, axes.offset, head.line
    last = head.entries - 1 - start
    lines = report.scores + line * plan.group + row * (heads.capacity + 1)
    older = valid & (offset != last) & (head.listed > 0)
    tl.store(report.named + line + start + offset, slot, mask=older)
    own = row < plan.group
    tl.store(lines + (start + offset)[None, :], logits, mask=older[None, :] & own)
    if (last < plan.block) & (head.listed > 0):
        nth = count_older(heads, head, plan)
        of_newest = tl.sum(tl.where((offset == last)[None, :], logits, 0.0), 1)
        tl.store(report.named + line + nth, head.newest)
        tl.store(lines + nth, of_newest[:, None], mask=own)
        end_report(report, heads, head.pair, line, nth + 1, plan)


@triton.jit
def end_report(report, heads, pair, line, number, plan: tl.constexpr):
    """Stores the number of a head's reported tokens, and fills the entries past them.

    `line` is the head's start in `named`.
    """
    capacity = heads.capacity
    scores, named = report.scores + line * plan.group, report.named + line
    tl.store(report.number + pair, number)
    for start in range(number, capacity + 1, plan.block):
        at = start + tl.arange(0, plan.block)
        tl.store(named + at, at * 0, mask=at <= capacity)
        for row in range(plan.group):
            minus_inf = tl.full([plan.block], float("-inf"), tl.float32)
            tl.store(scores + row * (capacity + 1) + at, minus_inf, mask=at <= capacity)
