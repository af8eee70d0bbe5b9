"""Divides rows among programs and threads: the static parameters of a kernel."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import triton

from jsparse.pallas_kernels.threshold_select.rules import (
    Always,
    Budget,
    Rule,
    Threshold,
    TopK,
    TopP,
)
from jsparse.pallas_kernels.triton_meeting import max_programs

ALWAYS = ("sink", "recent", "unit")
RULES = {TopK: "top_k", TopP: "top_p", Threshold: "threshold", Budget: "budget"}


class SelectTiling(NamedTuple):
    """Division of a row; the selection depends on it only by the order of sums.

    Under a budget, registers hold a row's sizes beside its scores, so tiles have half the entries,
    and half the entries end a search.

    Attributes:
        entries: entries of a tile per thread. More entries mean fewer threads, which repeat less of
            the work that every thread does.
        tile: maximum entries per tile; 32768 floats are half of an SM's registers.
        threads: minimum threads per row.
        few: maximum entries that may be drawn from a row, or listed, to end a search: a power of
            two, at most one per four threads. 0 draws none.
        part: entries of a long row per block, a power of two. For weighed rows it is twice or four
            times that; for other rows only if there would be too many blocks. A thread has 64 or
            128 of them, so that several blocks fit on an SM.
    """

    entries: int = 64
    tile: int = 32768
    threads: int = 128
    # drawing took top-p of 64 x 32K from 23.5 to 19.4 us, and of 256 x 32K from 43.4 to 41.6; top-k
    # of the latter from 39.6 to 44.1 (bench/README.md)
    few: int = 128
    part: int = 8192


@dataclass(frozen=True)
class SearchedRow:
    """Static parameters of a row and its search.

    Attributes:
        rule: "top_k", "top_p", "threshold" or "budget".
        value: the rule's number; None: every head has its own.
        softmax: whether its entries are logits. Otherwise they are weights, or scores that are only
            compared.
        normalised: whether the exponentials of its logits are the weights, whatever their sum.
        size: the number of its entries, and the distance between rows.
        threads: T of a tile.
        max_tile: maximum entries per tile.
        few: the number of entries that may be drawn to end a search; 0 draws none.
        parts: the number of blocks that share it, a power of two.
        posts: the maximum numbers that a block posts to the others at a time.
        sink, recent, unit: the entries that precede all others, as in `api.Always`; a unit of 0
            means none.
    """

    rule: str
    value: float | None
    softmax: bool
    normalised: bool
    size: int
    threads: int
    max_tile: int
    few: int
    parts: int = 1
    posts: int = 0
    sink: int = 0
    recent: int = 0
    unit: int = 0

    @property
    def runs(self) -> int:
        """R of a tile."""
        return max(min(triton.next_power_of_2(self.size), self.max_tile) // (4 * self.threads), 1)

    @property
    def tile(self) -> int:
        """The number of entries per tile."""
        return 4 * self.threads * self.runs

    @property
    def resident(self) -> bool:
        """Whether the row, or a block's part of it, stays in registers."""
        return self.size <= self.tile * self.parts

    @property
    def part(self) -> int:
        """The maximum number of entries per block."""
        return self.tile if self.parts > 1 else 32 * self.words

    @property
    def words(self) -> int:
        """The number of 32-bit words of its bitmap, which covers whole tiles."""
        return max(-(-self.size // self.tile), self.parts) * self.tile // 32

    @property
    def words_each(self) -> int:
        """The number of words of a bitmap that a thread lists at a time."""
        return max(self.runs // 8, 1)

    @property
    def slots(self) -> int:
        """The number of entries that a block may draw or list, into unused bitmaps.

        Blocks that share a row draw into separate memory.
        """
        if self.parts > 1:
            return min(self.few, self.threads // 4) // self.parts
        words = self.words if self.sized else 2 * self.words  # a list needs one bitmap itself
        return min(self.few, self.threads // 4, words) if self.resident else 0

    @property
    def mass(self) -> bool:
        """Whether the row is searched by its weights instead of its scores."""
        return self.rule == "top_p"

    @property
    def sized(self) -> bool:
        """Whether entries count as their sizes instead of one each."""
        return self.rule == "budget"


@dataclass(frozen=True)
class Lists:
    """Static parameters of one launch.

    Attributes:
        row: the row of units to search.
        cap: the search that cuts a list to the capacity; None: no list can be too long.
        group: rows of scores per KV head.
        sharing: KV heads that share a row of sizes.
        pooled: whether the rows of a group become one before the search. Otherwise each is
            searched, and the results are united.
        by_mass: whether units are pages, searched by the mass of their tokens.
        page_size: tokens per unit, 1 unless by_mass.
        capacity: C.
        with_lengths: whether heads have their own lengths.
        names: m, per head; 0 lists units by their indices.
    """

    row: SearchedRow
    cap: SearchedRow | None
    group: int
    sharing: int
    pooled: bool
    by_mass: bool
    page_size: int
    capacity: int
    with_lengths: bool
    names: int

    @property
    def rows(self) -> int:
        """The number of searched rows per KV head."""
        return 1 if self.pooled else self.group

    @property
    def shift(self) -> int:
        """log2 of the number of adjacent units that share a name; -1 without names."""
        return (self.row.size // self.names).bit_length() - 1 if self.names else -1

    @property
    def scores(self) -> int:
        """The number of scores per input row."""
        return self.row.size * self.page_size

    @property
    def pages_at_once(self) -> int:
        """The number of pages that a block sums at a time, 16 tokens per thread."""
        return max(16 * self.row.threads // self.page_size, 1)

    @property
    def pooled_at(self) -> int:
        """The offset of the pooled row in a head's floats, after the masses of pages."""
        return self.group * self.row.size * self.by_mass

    @property
    def cap_at(self) -> int:
        """The offset, in a head's floats, of the scores by which a list is cut."""
        return self.pooled_at + self.row.size * self.pooled

    @property
    def floats(self) -> int:
        """The number of scratch floats of a head."""
        if self.row.parts > 1:
            return 2 * self.row.parts * self.row.posts
        return self.cap_at + (0 if self.cap is None else self.row.size)

    @property
    def cap_word(self) -> int:
        """The offset of the bitmap of a cut list, after those of the rows."""
        return 2 * self.rows * self.row.words

    @property
    def words(self) -> int:
        """The number of words of a head's bitmaps."""
        if self.row.parts > 1:
            return self.cap_word + self.row.slots * self.row.parts
        return self.cap_word + (0 if self.cap is None else 2 * self.cap.words)


def searched_row(
    rule: Rule,
    size: int,
    scored: int,
    *,
    softmax: bool,
    normalised: bool,
    always: Always | None,
    tiling: SelectTiling,
) -> SearchedRow:
    """Divides a row of `size` entries, which are computed from `scored` scores."""
    tile, few = tiling.tile, tiling.few
    if isinstance(rule, Budget):  # sizes take the same number of registers as scores
        tile, few = tile // 2, few // 2
    threads = min(triton.next_power_of_2(scored), tile) // tiling.entries
    value = float(rule[0]) if isinstance(rule[0], int | float) else None
    return SearchedRow(
        rule=RULES[type(rule)],
        value=value,
        softmax=softmax,
        normalised=normalised,
        size=size,
        threads=max(threads, tiling.threads),
        max_tile=tile,
        few=few,
        **({} if always is None else {name: getattr(always, name) for name in ALWAYS}),
    )


def shared_row(row: SearchedRow, rows: int, members: int, tiling: SelectTiling) -> SearchedRow:
    """Returns the row divided among several blocks, if it is long, and not too long for that.

    Sums of weights depend on the number of blocks, and must not depend on the number of rows.
    Weighed rows therefore have parts that are fast for many rows. For many rows that are only
    counted, one block per row is faster.
    """
    weighed = row.mass or (row.softmax and members > 1)
    if row.resident:
        return row
    for tile in (tiling.part * n for n in ((2, 4) if weighed else (1, 2, 4))):
        parts = triton.next_power_of_2(-(-row.size // tile))
        threads = max(tile // 128, tiling.threads)
        if not weighed and rows * parts > 2 * jax.local_devices()[0].core_count:
            continue
        # each draws at least two entries
        if parts <= min(max_programs(), row.few // 2, threads // 8):
            posts = max(5, 2 * members)  # the summary of a row, and of the rows that become one
            return replace(row, max_tile=tile, threads=threads, parts=parts, posts=posts)
    return row
