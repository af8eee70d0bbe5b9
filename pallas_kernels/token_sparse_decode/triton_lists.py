"""Finds the tokens that each head reads: those of its list, or all if it is dense.

A list is of tokens or of pages, followed by the newest token. A head's tokens are cut into units of
whole blocks. `plan` is the LaunchPlan of triton_gpu.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class HeadArrays(NamedTuple):
    """The lists and lengths of all heads; None for missing arrays."""

    lengths: Any  # [B, K]
    number: Any  # [B, K], of listed ids
    dense: Any  # [B, K]
    ids: Any  # [B, K, capacity], of tokens or of pages
    bits: Any  # [B, K, capacity], of the tokens of pages
    table: Any  # [B, K, pages]
    capacity: Any
    pages: Any  # of a head


class HeadScalars(NamedTuple):
    """Scalars of one head."""

    pair: Any  # row · K + KV head
    entries: Any  # entries that it reads
    listed: Any  # number of these on its list; -1: it is dense
    newest: Any  # slot of its newest token
    line: Any  # pair · (capacity + 1): start of its list's known or reported logits


@triton.jit
def count_entries(heads, pair, mask, plan: tl.constexpr):
    """Counts the tokens that heads read, and those on their lists: -1 for a dense head."""
    entries = tl.load(heads.lengths + pair, mask=mask, other=0)
    listed = tl.load(heads.number + pair, mask=mask, other=0) * plan.tokens
    if heads.dense is not None:
        listed = tl.where(tl.load(heads.dense + pair, mask=mask, other=0) != 0, -1, listed)
    entries = tl.where((listed < 0) | (entries == 0), entries, tl.where(listed > 0, listed + 1, 0))
    return entries, listed


@triton.jit
def unit_size(entries, plan: tl.constexpr):
    """Returns the number of entries per unit."""
    blocks = tl.maximum(tl.cdiv(entries, plan.block * plan.max_units), plan.unit_blocks)
    return blocks * plan.block


@triton.jit
def first_units(used, long):
    """Numbers the units, those of the heads with long ones first.

    Args:
        used: each head's number of units.
        long: whether they are longer than others.

    Returns:
        The number of each head's first unit, and that of all units.
    """
    of_long = tl.where(long, used, 0)
    of_short = used - of_long
    offset = tl.where(long, 0, tl.sum(of_long, 0))
    ends = offset + tl.where(long, tl.cumsum(of_long, 0), tl.cumsum(of_short, 0))
    return ends - used, tl.sum(used, 0)


@triton.jit
def count_own(units):
    """Returns how many units this program has: see `own_unit`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    rounds = units // programs
    place = tl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + (place < units % programs).to(tl.int32)


@triton.jit
def own_unit(number):
    """Returns this program's unit of that number.

    Units are dealt out one to each program, and in every second round from the last program to the
    first, so that the programs with the first of the shorter units get no more of them.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    place = tl.where(number % 2 == 0, program, programs - 1 - program)
    return number * programs + place


@triton.jit
def find(heads, head, entry, plan: tl.constexpr):
    """Returns the slots of a block of entries, their rows in the pool, and a mask of valid ones."""
    unlisted = tl.where(head.listed < 0, entry, head.newest)
    named = entry < head.listed
    T: tl.constexpr = plan.tokens
    nth = head.pair.to(tl.int64) * heads.capacity + entry // T
    # unlisted tokens are converted to ids: a select after the load would make ptxas wait for one
    # load before it issues the next
    unit = tl.load(heads.ids + nth, mask=named, other=unlisted // T)
    slot = unit * T + tl.where(named, entry, unlisted) % T
    # the newest token counts once, as the last entry, whether or not it is listed
    valid = (entry < head.entries) & ((slot < head.newest) | (entry == head.entries - 1))
    if heads.bits is not None:
        bits = tl.load(heads.bits + nth, mask=named, other=-1)
        valid &= ((bits >> (entry % T)) & 1) != 0
    P: tl.constexpr = plan.page_size
    if heads.table is not None:
        page = tl.load(
            heads.table + head.pair.to(tl.int64) * heads.pages + slot // P, mask=valid, other=0
        )
        at = page.to(tl.int64) * P + slot % P
    else:
        at = head.pair.to(tl.int64) * heads.pages * P + slot
    return slot, at, valid


@triton.jit
def count_older(heads, head, plan: tl.constexpr):
    """Counts the ids below the newest; only the end of an ascending list may have others."""
    ids = heads.ids + head.pair.to(tl.int64) * heads.capacity
    older, searching = head.listed, True
    while searching:
        at = older - 1 - tl.arange(0, plan.block)
        others = tl.load(ids + at, mask=at >= 0, other=-1) >= head.newest
        number = tl.sum(others.to(tl.int32), 0)
        older -= number
        searching = number == plan.block
    return older
