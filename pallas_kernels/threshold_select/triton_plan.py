"""Decides how rows are shared out among programs and threads, which a kernel is made for."""

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
    """Describes how a row is shared out; what is chosen depends on it only by the order of sums.

    Under a budget a row's sizes lie beside its scores: tiles have half as many entries, and half as
    many end a search.

    Attributes:
        entries: entries of a tile per thread. With more there are fewer threads, which repeat less
            of the work that every thread does.
        tile: most entries per tile; 32768 floats are half of a multiprocessor's registers.
        threads: least number of threads per row.
        few: most entries that may be drawn out of a row, or listed, to end a search, a power of
            two; at most one per four threads. 0 draws none.
        part: entries of a long row that a block takes, a power of two. Of rows that are weighed it
            takes twice as many, or four times; of others only where there would be too many blocks.
            A thread holds 64 or 128 of them, so that a multiprocessor holds several blocks.
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
    """Holds the static parameters of a row and its search.

    Attributes:
        rule: "top_k", "top_p", "threshold" or "budget".
        value: the rule's number; None where every head has its own.
        softmax: whether its entries are logits. If not, they are weights, or scores that are only
            compared.
        normalised: whether the exponentials of its logits are the weights, whatever their sum.
        size: number of its entries, and the distance between rows.
        threads: T of a tile.
        max_tile: most entries of a tile.
        few: number of entries that may be drawn to end a search; 0 draws none.
        parts: the number of blocks that share it, a power of two.
        posts: the most numbers that each of these tells the others at a time.
        sink, recent, unit: the entries that come before all others, as `api.Always` names them;
            a unit of 0 names none.
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
        """Returns R of a tile."""
        return max(min(triton.next_power_of_2(self.size), self.max_tile) // (4 * self.threads), 1)

    @property
    def tile(self) -> int:
        """Returns the number of entries per tile."""
        return 4 * self.threads * self.runs

    @property
    def resident(self) -> bool:
        """Returns whether the row, or a block's part of it, stays in registers."""
        return self.size <= self.tile * self.parts

    @property
    def part(self) -> int:
        """Returns the most entries that are a block's."""
        return self.tile if self.parts > 1 else 32 * self.words

    @property
    def words(self) -> int:
        """Returns the number of 32-bit words of its bitmap, which covers whole tiles."""
        return max(-(-self.size // self.tile), self.parts) * self.tile // 32

    @property
    def words_each(self) -> int:
        """Returns the number of words of a bitmap that a thread lists at a time."""
        return max(self.runs // 8, 1)

    @property
    def slots(self) -> int:
        """Returns the number of entries that a block may draw or list, into unused bitmaps.

        Blocks that share a row draw into memory of its own.
        """
        if self.parts > 1:
            return min(self.few, self.threads // 4) // self.parts
        words = self.words if self.sized else 2 * self.words  # a list needs a bitmap itself
        return min(self.few, self.threads // 4, words) if self.resident else 0

    @property
    def mass(self) -> bool:
        """Returns whether the row is searched by its weights rather than its scores."""
        return self.rule == "top_p"

    @property
    def sized(self) -> bool:
        """Returns whether entries count as their sizes rather than as one each."""
        return self.rule == "budget"


@dataclass(frozen=True)
class Lists:
    """Holds the static parameters of one launch.

    Attributes:
        row: the row of units that is searched.
        cap: the search that cuts a list to the capacity; None where none can be too long.
        group: rows of scores per KV head.
        sharing: KV heads that share a row of sizes.
        pooled: whether the rows of a group become one before the search. If not, each is searched,
            and the results are united.
        by_mass: whether units are pages, searched by the mass of their tokens.
        page_size: tokens per unit, 1 unless by_mass.
        capacity: C.
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
    with_lengths: bool
    names: int

    @property
    def rows(self) -> int:
        """Returns the number of rows that are searched per KV head."""
        return 1 if self.pooled else self.group

    @property
    def shift(self) -> int:
        """Returns log2 of the number of neighbouring units that share a name; -1 without names."""
        return (self.row.size // self.names).bit_length() - 1 if self.names else -1

    @property
    def scores(self) -> int:
        """Returns the number of scores per row that is given."""
        return self.row.size * self.page_size

    @property
    def pages_at_once(self) -> int:
        """Returns the number of pages that a block sums at a time, 16 tokens per thread."""
        return max(16 * self.row.threads // self.page_size, 1)

    @property
    def pooled_at(self) -> int:
        """Returns where the pooled row lies in a head's floats, behind the masses of pages."""
        return self.group * self.row.size * self.by_mass

    @property
    def cap_at(self) -> int:
        """Returns where in a head's floats the scores lie by which a list is cut."""
        return self.pooled_at + self.row.size * self.pooled

    @property
    def floats(self) -> int:
        """Returns the number of floats in memory that a head needs meanwhile."""
        if self.row.parts > 1:
            return 2 * self.row.parts * self.row.posts
        return self.cap_at + (0 if self.cap is None else self.row.size)

    @property
    def cap_word(self) -> int:
        """Returns where the bitmap of a cut list begins, behind those of the rows."""
        return 2 * self.rows * self.row.words

    @property
    def words(self) -> int:
        """Returns the number of words of bitmaps that a head needs."""
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
    """Shares out a row of `size` entries, which are made of `scored` scores."""
    tile, few = tiling.tile, tiling.few
    if isinstance(rule, Budget):  # sizes take as many registers as scores
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
    """Returns the row as several blocks share it, if it is long, and not too long for that.

    Sums of weights depend on how many share a row, and may not depend on the number of rows: so
    weighed rows have parts that are fast for many of them. Of many rows that are only counted,
    blocks of their own are faster.
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
            posts = max(5, 2 * members)  # what sums up a row, and the rows that become one
            return replace(row, max_tile=tile, threads=threads, parts=parts, posts=posts)
    return row
