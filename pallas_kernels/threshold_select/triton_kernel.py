"""Defines the kernel, which runs a thread block for every row that is searched.

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
    """Holds the static parameters of one launch.

    Attributes:
        row: the row that is searched, of units or of their tokens.
        cap: the search that cuts a list to the capacity; None where none can be too long.
        group: rows of scores per KV head.
        sharing: KV heads that share a row of sizes.
        pooled: whether the rows of a group become one before the search. If not, each is searched,
            and the results are united.
        by_mass: whether pages are searched by their mass. If not, their tokens are searched.
        page_size: tokens per unit, where scores are of tokens and units are pages, else 1.
        capacity: C.
        with_bits: whether pages carry token bits.
        with_lengths: whether heads have their own lengths.
        names: m, per head; 0 lists units as their indices.
    """

    row: SearchedRow
    cap: SearchedRow | None
    group: int
    sharing: int
    pooled: bool
    by_mass: bool
    page_size: int
    capacity: int
    with_bits: bool
    with_lengths: bool
    names: int

    @property
    def rows(self) -> int:
        """Return the number of rows that are searched per KV head."""
        return 1 if self.pooled else self.group

    @property
    def entries(self) -> int:
        """Return the number of entries of the searched row per unit."""
        return 1 if self.by_mass else self.page_size

    @property
    def units(self) -> int:
        """Return the number of units."""
        return self.row.size // self.entries

    @property
    def shift(self) -> int:
        """Return log2 of the number of neighbouring units that share a name; -1 without names."""
        return (self.units // self.names).bit_length() - 1 if self.names else -1

    @property
    def scores(self) -> int:
        """Return the number of scores per row that is given."""
        return self.row.size * (self.page_size if self.by_mass else 1)

    @property
    def pages_at_once(self) -> int:
        """Return the number of pages that a block sums at a time, 16 tokens per thread."""
        return max(16 * self.row.threads // self.page_size, 1)

    @property
    def pooled_at(self) -> int:
        """Return where the pooled row lies in a head's floats, behind the masses of pages."""
        return self.group * self.row.size * self.by_mass

    @property
    def cap_at(self) -> int:
        """Return where in a head's floats the scores lie by which a list is cut."""
        return self.pooled_at + self.row.size * self.pooled

    @property
    def floats(self) -> int:
        """Return the number of floats in memory that a head needs meanwhile."""
        return self.cap_at + (0 if self.cap is None else self.units)

    @property
    def cap_word(self) -> int:
        """Return where the bitmap of a cut list begins, behind those of the rows."""
        return 2 * self.rows * self.row.words

    @property
    def words(self) -> int:
        """Return the number of words of bitmaps that a head needs."""
        return self.cap_word + (0 if self.cap is None else 2 * self.cap.words)


@triton.jit
def select_kernel(
    scores,  # [B, K, G, n]
    settings,  # [B, K]
    sizes,  # [B, K / plan.sharing, n], read where plan.row.sized
    lengths,  # [B, K]
    names,  # [B, K, m]
    ids,  # [B, K, C]
    count,  # [B, K]
    bits,  # [B, K, C], or [1] without bits
    bitmaps,  # [B · K, plan.words]
    floats,  # [B · K, plan.floats], or [B · K, 1] where none are needed
    arrived,  # [B · K], zeros where a head has several rows
    plan: tl.constexpr,
):
    """Search one row, of program head · rows + row; the last of a head also writes its list."""
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
    sizes += wide // plan.sharing * plan.row.size
    floats += wide * plan.floats
    bitmaps += wide * plan.words
    if plan.by_mass:  # all of the group's rows where they are pooled, else the program's own
        for r in range(plan.group // plan.rows):
            sum_pages(row + r * plan.scores, floats + (g + r) * plan.units, length, plan)
        tl.debug_barrier()
        row = floats + g * plan.units
        length = tl.cdiv(length, plan.page_size)
    if plan.pooled:
        pool(row, length, None, floats + plan.pooled_at, plan.group, 1, plan.row.size, plan)
        tl.debug_barrier()
        row = floats + plan.pooled_at
    choose(row, sizes, bitmaps + 2 * g * plan.row.words, length, setting, ROW)
    last = True
    if plan.rows > 1:
        # release this row's bitmap, acquire those of the rows that finished before
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
def write_list(
    rows,  # [rows, row.size]: what was searched
    bitmaps,  # [plan.words]
    floats,  # [plan.floats]
    length,
    names,  # [m]
    ids,  # [C]
    count,  # []
    bits,  # [C]
    plan: tl.constexpr,
):
    """Write one head's list from the bitmaps of its rows, with 0 past its end.

    The bitmaps are united, and the list is cut to the capacity if it is too long.
    """
    if plan.rows > 1:
        unite(bitmaps, length, plan)
        tl.debug_barrier()
    total = list_units(bitmaps, bitmaps, length, names, ids, bits, False, plan)
    if plan.cap is not None:
        CAP: tl.constexpr = plan.cap
        # too long: search for the best units by the best score of each, and list those
        if total > plan.capacity:
            best = floats + plan.cap_at
            kept = bitmaps + plan.cap_word
            pool(rows, length, bitmaps, best, plan.rows, plan.entries, plan.units, plan)
            tl.debug_barrier()
            choose(
                best,
                best,  # stands in for sizes
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
def list_units(
    bitmap,  # of entries
    kept,  # of units if CUT, else `bitmap`
    length,
    names,  # [m]
    ids,  # [C]
    bits,  # [C]
    CUT: tl.constexpr,
    plan: tl.constexpr,
):
    """List what a bitmap marks and return its number; if CUT, only what `kept` marks as well."""
    if plan.entries == 1 and not plan.with_bits:
        ROW: tl.constexpr = plan.row
        return list_entries(kept, length, names, ids, plan.capacity, plan.shift, ROW)
    return list_pages(bitmap, kept, length, names, ids, bits, CUT, plan)
