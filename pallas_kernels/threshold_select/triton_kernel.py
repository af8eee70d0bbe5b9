"""The kernel: a thread block for every row that is searched.

A block finds its row's threshold and writes what it chooses as bits. The last block of a KV head to
finish unites the bits of the group's rows, cuts the union to the capacity if need be, and lists it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_bits import list_entries, list_pages, unite
from jsparse.pallas_kernels.threshold_select.triton_pools import pool, sum_pages
from jsparse.pallas_kernels.threshold_select.triton_search import choose
from jsparse.pallas_kernels.threshold_select.triton_tiles import SearchedRow


@dataclass(frozen=True)
class Lists:
    """What is static about a call.

    Attributes:
        row: the row that is searched, of units or of their tokens.
        cap: the search that cuts a list to the capacity; None where none can be too long.
        group: rows of scores a KV head.
        pooled: the rows of a group become one before the search; False: each is searched, and what
            is found united.
        by_mass: pages are searched by their mass; False: their tokens are searched.
        page_size: tokens of a unit, where scores are of tokens and units are pages, else 1.
        capacity: C.
        with_bits: pages carry token bits.
        with_lengths: heads have lengths of their own.
        names: m, of a head; 0: units are listed as their indices.
    """

    row: SearchedRow
    cap: SearchedRow | None
    group: int
    pooled: bool
    by_mass: bool
    page_size: int
    capacity: int
    with_bits: bool
    with_lengths: bool
    names: int

    @property
    def rows(self) -> int:
        """Rows that are searched a KV head."""
        return 1 if self.pooled else self.group

    @property
    def entries(self) -> int:
        """Entries of the searched row that make a unit."""
        return 1 if self.by_mass else self.page_size

    @property
    def units(self) -> int:
        """How many there are."""
        return self.row.size // self.entries

    @property
    def shift(self) -> int:
        """The logarithm to base 2 of how many neighbouring units share a name; -1: there are no
        names.
        """
        return (self.units // self.names).bit_length() - 1 if self.names else -1

    @property
    def scores(self) -> int:
        """Scores of a row that is given."""
        return self.row.size * (self.page_size if self.by_mass else 1)

    @property
    def pages_at_once(self) -> int:
        """Pages that a block sums at a time, 16 tokens a thread."""
        return max(16 * self.row.threads // self.page_size, 1)

    @property
    def words_each(self) -> int:
        """Words of a bitmap that a thread lists at a time."""
        return max(self.row.runs // 8, 1)

    @property
    def pooled_at(self) -> int:
        """Where the pooled row lies among a head's floats; the masses of pages come before."""
        return self.group * self.row.size * self.by_mass

    @property
    def cap_at(self) -> int:
        """Where the scores lie by which a list is cut."""
        return self.pooled_at + self.row.size * self.pooled

    @property
    def floats(self) -> int:
        """Floats a head needs in between."""
        return self.cap_at + (0 if self.cap is None else self.units)

    @property
    def cap_word(self) -> int:
        """Where the bitmap of a cut list begins; those of the rows come before."""
        return 2 * self.rows * self.row.words

    @property
    def words(self) -> int:
        """Words of bitmaps a head needs."""
        return self.cap_word + (0 if self.cap is None else 2 * self.cap.words)


@triton.jit
def select_kernel(
    scores, settings, lengths, names, ids, count, bits, bitmaps, floats, arrived, plan: tl.constexpr
):
    """One searched row: program head · rows + row."""
    ROW: tl.constexpr = plan.row
    head = tl.program_id(0) // plan.rows
    g = tl.program_id(0) % plan.rows
    length = tl.full([], plan.scores, tl.int32)
    if plan.with_lengths:
        length = tl.minimum(tl.maximum(tl.load(lengths + head), 0), plan.scores)
    setting = (
        tl.load(settings + head).to(tl.float32)
        if plan.row.value is None
        else tl.full([], plan.row.value, tl.float32)
    )
    if plan.row.rule == "top_k" and plan.entries == 1:
        setting = tl.minimum(
            setting, plan.capacity
        )  # what is not among a row's C best is not in the list
    wide = head.to(tl.int64)
    row = scores + (wide * plan.group + g) * plan.scores
    floats += wide * plan.floats
    bitmaps += wide * plan.words
    if plan.by_mass:
        for r in range(plan.group // plan.rows):
            sum_pages(row + r * plan.scores, floats + (g + r) * plan.units, length, plan)
        tl.debug_barrier()
        row = floats + g * plan.units
        length = tl.cdiv(length, plan.page_size)
    if plan.pooled:
        pool(row, length, None, floats + plan.pooled_at, plan.group, 1, plan.row.size, plan)
        tl.debug_barrier()
        row = floats + plan.pooled_at
    choose(row, bitmaps + 2 * g * plan.row.words, length, setting, ROW)
    last = True
    if plan.rows > 1:
        last = tl.atomic_add(arrived + head, 1, sem="acq_rel") == plan.rows - 1
    if last:
        write_list(
            row - g * plan.row.size,
            bitmaps,
            floats,
            length,
            names + wide * plan.names,
            ids + wide * plan.capacity,
            count + head,
            bits + wide * plan.capacity,
            plan,
        )


@triton.jit
def write_list(rows, bitmaps, floats, length, names, ids, count, bits, plan: tl.constexpr):
    """One head's list, from the bitmaps of its rows: united, cut to the capacity if it is too long,
    0 past its end.
    """
    if plan.rows > 1:
        unite(bitmaps, length, plan)
        tl.debug_barrier()
    total = list_units(bitmaps, bitmaps, length, names, ids, bits, False, plan)
    if plan.cap is not None:
        CAP: tl.constexpr = plan.cap
        if total > plan.capacity:
            best = floats + plan.cap_at
            kept = bitmaps + plan.cap_word
            pool(rows, length, bitmaps, best, plan.rows, plan.entries, plan.units, plan)
            tl.debug_barrier()
            choose(
                best,
                kept,
                tl.full([], plan.units, tl.int32),
                tl.full([], plan.capacity, tl.float32),
                CAP,
            )
            total = list_units(bitmaps, kept, length, names, ids, bits, True, plan)
    tl.store(count, total)
    for start in range(0, plan.capacity, 4 * plan.row.threads):
        slot = start + tl.arange(0, 4 * plan.row.threads)
        past = (slot >= total) & (slot < plan.capacity)
        tl.store(ids + slot, slot * 0, mask=past)
        if plan.with_bits:
            tl.store(bits + slot, (slot * 0).to(tl.uint32), mask=past)


@triton.jit
def list_units(bitmap, kept, length, names, ids, bits, CUT: tl.constexpr, plan: tl.constexpr):
    """Lists what a bitmap marks and returns its number; of a list that is CUT, what the bitmap
    `kept` marks as well.
    """
    if plan.entries == 1 and not plan.with_bits:
        return list_entries(kept, length, names, ids, plan)
    return list_pages(bitmap, kept, length, names, ids, bits, CUT, plan)
