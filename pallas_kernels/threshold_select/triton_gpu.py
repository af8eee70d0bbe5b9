"""Implements `api.threshold_select` with jax-triton, in one launch.

A thread block runs for every row that is searched. It finds its row's threshold and writes what it
chooses as bits. The last block of a KV head to finish unites the bits of the group's rows, cuts the
union to the capacity if need be, and lists it. Long rows that are a head's only one are shared by
several blocks, each of which keeps its part in registers: after every pass over it they meet, and
each adds up what all have found.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int32

from jsparse.pallas_kernels.threshold_select.api import Budget, Rule, Threshold, TopK, TopP
from jsparse.pallas_kernels.threshold_select.triton_bits import (
    list_entries,
    list_units,
    number_of,
    unite,
)
from jsparse.pallas_kernels.threshold_select.triton_search import choose
from jsparse.pallas_kernels.threshold_select.triton_tiles import (
    Share,
    pool,
    pool_share,
    post,
    posted,
    sum_before,
    sum_pages,
    take,
)
from jsparse.pallas_kernels.triton_meeting import max_programs, meet
from jsparse.selection import Selection
from jsparse.shapes import Lengths

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
        part: entries of a long row that a block takes, a power of two; two or four times as many
            where that would be more blocks than can meet, or than rows that are only counted are
            worth. A thread takes 32 then, or more where there are 512.
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
        posts: how many numbers each of these tells the others at a time.
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
    posts: int = 4

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
        """Returns the number of rows that are searched per KV head."""
        return 1 if self.pooled else self.group

    @property
    def entries(self) -> int:
        """Returns the number of entries of the searched row per unit."""
        return 1 if self.by_mass else self.page_size

    @property
    def units(self) -> int:
        """Returns the number of units."""
        return self.row.size // self.entries

    @property
    def shift(self) -> int:
        """Returns log2 of the number of neighbouring units that share a name; -1 without names."""
        return (self.units // self.names).bit_length() - 1 if self.names else -1

    @property
    def scores(self) -> int:
        """Returns the number of scores per row that is given."""
        return self.row.size * (self.page_size if self.by_mass else 1)

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
        return self.cap_at + (0 if self.cap is None else self.units)

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


def threshold_select(
    scores: Float[Array, "B K G n"],
    rule: Rule,
    *,
    capacity: int,
    granularity: str,
    page_size: int,
    weights: str,
    group: str,
    lengths: Lengths | None,
    names: Int32[Array, "B K m"] | None,
    tiling: SelectTiling | None = None,
) -> Selection:
    """Implements `api.threshold_select` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, heads, members, scored = scores.shape
    setting, sizes = rule[0], rule.sizes if isinstance(rule, Budget) else None
    static = isinstance(setting, int | float)
    by_mass, pooled = granularity == "page_mass", group == "max" and members > 1
    row = searched_row(
        rule,
        scored // page_size if by_mass else scored,
        scored,
        softmax=weights == "softmax",
        normalised=pooled,
        tiling=tiling or SelectTiling(),
    )
    units = scored // page_size
    # no list can be too long: there are no more units, or one row chooses, and the kernel lowers
    # its k to the capacity
    fits = capacity >= units or (
        row.rule == "top_k" and row.size == units and (pooled or members == 1)
    )
    whole = not (by_mass or (members > 1 and not pooled) or granularity == "bits")
    if fits and whole and units == row.size and row.rule in ("top_k", "top_p"):
        row = shared_row(row, batch * heads, members, tiling or SelectTiling())
    by_score = {"rule": "top_k", "value": None, "softmax": False, "normalised": False}
    plan = Lists(
        row=row,
        cap=None if fits else replace(row, size=units, **by_score),
        group=members,
        sharing=1 if sizes is None else heads // sizes.shape[1],
        pooled=pooled,
        by_mass=by_mass,
        page_size=page_size,
        capacity=capacity,
        with_bits=granularity == "bits",
        with_lengths=lengths is not None,
        names=0 if names is None else names.shape[-1],
    )
    listed = jax.ShapeDtypeStruct((batch, heads, capacity), jnp.int32)
    outputs = (
        listed,
        jax.ShapeDtypeStruct((batch, heads), jnp.int32),  # count
        jax.ShapeDtypeStruct(listed.shape if plan.with_bits else (1,), jnp.uint32),
        # from here on memory that the kernel works in: bitmaps, floats, rows that have finished
        jax.ShapeDtypeStruct((batch * heads, plan.words), jnp.uint32),
        jax.ShapeDtypeStruct((batch * heads, max(plan.floats, 1)), jnp.float32),
        jax.ShapeDtypeStruct((batch * heads,), jnp.int32),
    )
    alone = row.parts == 1
    ids, count, bits, *_ = triton_call(
        scores,
        scores if static else setting,  # scores stand in for arrays that the call lacks
        scores if sizes is None else sizes,
        scores if lengths is None else lengths,
        scores if names is None else names,
        kernel=select_kernel if alone else select_shared_kernel,
        out_shape=outputs,
        grid=(batch * heads * plan.rows * row.parts,),
        num_warps=plan.row.threads // 32,
        num_stages=1,
        zeroed_outputs=() if alone and plan.rows == 1 else (len(outputs) - 1,),
        plan=plan,
    )
    bits = bits if plan.with_bits else None
    return Selection(
        ids, count, bits=bits, granularity="token" if granularity == "token" else "page"
    )


def searched_row(
    rule: Rule, size: int, scored: int, *, softmax: bool, normalised: bool, tiling: SelectTiling
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
    )


def shared_row(row: SearchedRow, rows: int, members: int, tiling: SelectTiling) -> SearchedRow:
    """Returns the row as several blocks share it, if it is long, and not too long for that.

    Sums of weights depend on how many share a row, and may not depend on the number of rows. Of
    many rows that are only counted, blocks of their own are faster.
    """
    weighed = row.mass or (row.softmax and members > 1)
    if row.resident:
        return row
    for tile in (tiling.part, 2 * tiling.part, 4 * tiling.part):
        parts, threads = triton.next_power_of_2(-(-row.size // tile)), min(tile // 32, 512)
        if not weighed and rows * parts > 2 * jax.local_devices()[0].core_count:
            continue
        if parts <= min(max_programs(), row.few, threads // 4):
            posts = max(4, 2 * members)
            return replace(row, max_tile=tile, threads=threads, parts=parts, posts=posts)
    return row


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
    """Searches one row, of program head · rows + row; the last of a head also writes its list."""
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
        # what is not among a row's C best is not in the list
        setting = tl.minimum(setting, plan.capacity)
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
    words = bitmaps + 2 * g * plan.row.words
    choose(take(row, sizes, length, words, Share(0, row, row), ROW), words, setting, 0, ROW)
    last = True
    if plan.rows > 1:
        # release this row's bitmap, acquire those of the rows that finished before
        last = tl.atomic_add(arrived + head, 1, sem="acq_rel") == plan.rows - 1
    if last:
        rows, names = row - g * plan.row.size, names + wide * plan.names
        ids, bits = ids + wide * plan.capacity, bits + wide * plan.capacity
        write_list(rows, bitmaps, floats, length, names, ids, count + head, bits, plan)


@triton.jit
def select_shared_kernel(
    scores,  # [B, K, G, n]; more than one row of a head becomes one
    settings,  # [B, K]
    sizes,  # not read
    lengths,  # [B, K]
    names,  # [B, K, m]
    ids,  # [B, K, C]
    count,  # [B, K]
    bits,  # not written
    bitmaps,  # [B · K, plan.words]
    floats,  # [B · K, plan.floats]
    arrived,  # [B · K], zeros
    plan: tl.constexpr,
):
    """Searches a part of a head's row, of program head · parts + part, and lists what is chosen."""
    ROW: tl.constexpr = plan.row
    PARTS: tl.constexpr = plan.row.parts
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    length = tl.full([], plan.scores, tl.int32)
    if plan.with_lengths:
        length = tl.minimum(tl.maximum(tl.load(lengths + head), 0), plan.scores)
    setting = (
        tl.load(settings + head).to(tl.float32)
        if plan.row.value is None
        else tl.full([], plan.row.value, tl.float32)
    )
    if plan.row.rule == "top_k":
        setting = tl.minimum(setting, plan.capacity)
    wide = head.to(tl.int64)
    scores += wide * plan.group * plan.scores
    words = bitmaps + wide * plan.words
    begin = part * plan.row.tile
    share = Share(begin, floats + wide * plan.floats, arrived + head)
    row, met = take(scores, scores, length, words + plan.cap_word, share, ROW), 0
    if plan.pooled:
        row, met = pool_share(row, plan.group, met, ROW)
    met = choose(row, words, setting, met, ROW)
    end = tl.minimum(length, begin + plan.row.tile)
    post(row, met, 0, number_of(words, begin, end, ROW).to(tl.float32), ROW)
    meet(share.arrived, met, PARTS)
    numbers = posted(row, met, 0, ROW)
    earlier, total = sum_before(numbers, ROW).to(tl.int32), tl.sum(numbers, 0).to(tl.int32)
    ids, names = ids + wide * plan.capacity, names + wide * plan.names
    list_entries(words, begin, end, earlier, names, ids, plan.capacity, plan.shift, ROW)
    if part == 0:
        tl.store(count + head, total)
    for start in range(part * 4 * ROW.threads, plan.capacity, PARTS * 4 * ROW.threads):
        slot = start + tl.arange(0, 4 * ROW.threads)
        tl.store(ids + slot, slot * 0, mask=(slot >= total) & (slot < plan.capacity))


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
    """Writes one head's list from the bitmaps of its rows, with 0 past its end.

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
            every, limit = (
                tl.full([], plan.units, tl.int32),
                tl.full([], plan.capacity, tl.float32),
            )
            units = take(best, best, every, kept, Share(0, best, best), CAP)  # has no sizes
            choose(units, kept, limit, 0, CAP)
            total = list_units(bitmaps, kept, length, names, ids, bits, True, plan)
    tl.store(count, total)
    for start in range(0, plan.capacity, 4 * plan.row.threads):
        slot = start + tl.arange(0, 4 * plan.row.threads)
        past = (slot >= total) & (slot < plan.capacity)
        tl.store(ids + slot, slot * 0, mask=past)
        if plan.with_bits:
            tl.store(bits + slot, (slot * 0).to(tl.uint32), mask=past)
