"""Writes marks as bitmaps of 32-bit words, unites them, and lists the marked entries.

`plan` is the SearchedRow of triton_gpu up to `lowest`, and its Lists from `unite` on, except in
`list_entries`, which also serves searches.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_tiles import first_of_runs

ALL_TIES = tl.constexpr(2**31 - 1)


@triton.jit
def mark(x, words, start, t, ties, end, plan: tl.constexpr):
    """Writes a bit for each entry of a tile that is at least t, to its part of the bitmap.

    If not all entries equal to t are kept, these get their own bitmap, `plan.words` further on.
    Under a budget, ties at or past `end` in the row get no bit.
    """
    at = word_index(plan)
    kept = x >= t
    if plan.sized:
        entry = start + first_of_runs(plan) + tl.arange(0, 4)[None, None, :]
        kept &= (x != t) | (entry < end)
    tl.store(words + at, pack(kept, plan))
    if ties != ALL_TIES:
        tl.store(words + plan.words + at, pack(x == t, plan))


@triton.jit
def pack(marks, plan: tl.constexpr):
    """Packs a tile of marks [T, R, 4] into 32-bit words [T / 8, R].

    Word w of run r covers 32 entries from 32·(r·T/8 + w) on.
    """
    # [T, R]: four adjacent entries of a thread's run; eight threads make a word
    nibbles = tl.sum(marks.to(tl.uint32) << tl.arange(0, 4).to(tl.uint32)[None, None, :], 2)
    shift = (tl.arange(0, 8) * 4).to(tl.uint32)[None, :, None]
    return tl.sum(tl.reshape(nibbles, [plan.threads // 8, 8, plan.runs]) << shift, 1)


@triton.jit
def word_index(plan: tl.constexpr):
    """Returns the indices of the words of `pack` in the tile's part of the bitmap."""
    WORDS: tl.constexpr = plan.threads // 8
    return tl.arange(0, plan.runs)[None, :] * WORDS + tl.arange(0, WORDS)[:, None]


@triton.jit
def trim(
    words,  # [2 · plan.words]: the bitmap, then that of entries equal to the threshold
    sizes,  # [plan.size], read if plan.sized
    length,
    ties,
    plan: tl.constexpr,
):
    """Removes all but the first entries equal to the threshold from a bitmap.

    `ties` is the number to keep or, if entries have sizes, the maximum sum of their sizes.
    """
    for start in range(0, tl.cdiv(length, 32), plan.threads):
        at = start + tl.arange(0, plan.threads)
        inside = at * 32 < length
        equal = tl.load(words + plan.words + at, mask=inside, other=0)
        number = size_of(equal, sizes + at * 32, plan)
        word = tl.load(words + at, mask=inside, other=0) ^ equal
        room = ties - (tl.cumsum(number, 0) - number)
        tl.store(words + at, word | lowest(equal, sizes + at * 32, room, plan), mask=inside)
        ties -= tl.sum(number, 0)


@triton.jit
def mark_first(
    words,  # [2 · plan.words], as in `trim`
    length,
    plan: tl.constexpr,
):
    """Adds the first entry equal to the threshold to a bitmap."""
    first = length
    for start in range(0, tl.cdiv(length, 32), plan.threads):
        at = start + tl.arange(0, plan.threads)
        equal = tl.load(words + plan.words + at, mask=at * 32 < length, other=0)
        entry = at * 32 + ones((equal ^ (equal - 1)) >> 1)  # bits below the lowest set bit
        first = tl.minimum(first, tl.min(tl.where(equal != 0, entry, length), 0))
    word = words + first // 32
    tl.store(word, tl.load(word) | tl.full([], 1, tl.uint32) << (first % 32).to(tl.uint32))


@triton.jit
def ones(word):
    """Counts the set bits."""
    # bit sums by twos, fours and bytes; the product adds the bytes in its highest one
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def size_of(
    word,
    sizes,  # from bit 0's on
    plan: tl.constexpr,
):
    """Returns the counts of the entries of set bits: their sizes, or one each."""
    if plan.sized:
        total = tl.zeros(word.shape, tl.int32)
        for bit in tl.static_range(32):
            total += tl.load(sizes + bit, mask=(word >> bit) & 1 == 1, other=0).to(tl.int32)
        return total
    return ones(word)


@triton.jit
def lowest(
    word,
    sizes,  # from bit 0's on
    room,
    plan: tl.constexpr,
):
    """Keeps the lowest set bits that fit into `room`."""
    kept = word ^ word
    for bit in tl.static_range(32):
        one = (word >> bit) & 1
        if plan.sized:
            room -= tl.load(sizes + bit, mask=one == 1, other=0).to(tl.int32)
        else:
            room -= one.to(tl.int32)
        kept |= tl.where(room >= 0, one << bit, 0)
    return kept


@triton.jit
def unite(
    words,  # [rows, 2, row.words]: each row's bitmap, then that of its ties
    length,
    plan: tl.constexpr,
):
    """Writes the union of a head's bitmaps over the first."""
    for start in range(0, tl.cdiv(length, 32), plan.row.threads):
        at = start + tl.arange(0, plan.row.threads)
        inside = at * 32 < length
        word = tl.load(words + at, mask=inside, other=0)
        for g in range(1, plan.rows):
            word |= tl.load(words + 2 * g * plan.row.words + at, mask=inside, other=0)
        tl.store(words + at, word, mask=inside)


@triton.jit
def list_entries(
    words,  # the bitmap of all entries
    begin,  # first entry to list, a multiple of 32
    end,  # end of the entries
    total,  # number of marked entries before
    names,  # [m]
    ids,  # [CAPACITY]
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
    row: tl.constexpr,
):
    """Writes the names of marked entries, ascending, up to the capacity; returns their number.

    The words of a tile are listed at once. `row` is a SearchedRow.
    """
    T: tl.constexpr = row.threads
    EACH: tl.constexpr = row.words_each
    for start in range(begin // 32, tl.cdiv(end, 32), T * EACH):
        at = start + tl.arange(0, T)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        word = tl.load(words + at, mask=at * 32 < end, other=0)
        number = ones(word)
        in_thread = tl.sum(number, 1)
        # marks before each word: those of earlier words, threads, and words of this thread
        slot = (
            total + (tl.cumsum(in_thread, 0) - in_thread)[:, None] + tl.cumsum(number, 1) - number
        )
        list_bits(word, at * 32, ids + slot, CAPACITY - slot, names, SHIFT)
        total += tl.sum(in_thread, 0)
    return total


@triton.jit
def number_of(words, begin, end, row: tl.constexpr):
    """Returns the number of marked entries from a multiple of 32 on."""
    T: tl.constexpr = row.threads
    number = tl.zeros([T], tl.int32)
    for start in range(begin // 32, tl.cdiv(end, 32), T):
        at = start + tl.arange(0, T)
        number += ones(tl.load(words + at, mask=at * 32 < end, other=0))
    return tl.sum(number, 0)


@triton.jit
def list_bits(
    word,
    first,  # entry of bit 0
    ids,  # destination of the first name
    room,
    names,  # [m]
    SHIFT: tl.constexpr,
):
    """Writes the name of entry first + b for every set bit b, ascending, at most `room` of them.

    Usually few bits are set, so each warp loops only for its fullest word, which Triton cannot
    express.
    """
    # $1 to $6 are the arguments below, in order. brev and clz find the lowest set bit, and word &
    # (word - 1) clears it. If SHIFT ≥ 0, `run` = entry >> SHIFT, and the id is entry + ((names[run]
    # - run) << SHIFT). $0 exists because an operation must have a result.
    tl.inline_asm_elementwise(
        """{
        .reg .b32 word, bit, room, run, name;
        .reg .b64 id, at;
        .reg .pred done, named;
        setp.ge.s32 named, $6, 0;
        mov.b32 word, $1;
        mov.b32 room, $4;
        mov.b64 id, $3;
        next:
        setp.eq.u32 done, word, 0;
        setp.le.or.s32 done, room, 0, done;
        @done bra end;
        brev.b32 bit, word;
        clz.b32 bit, bit;
        add.s32 bit, bit, $2;
        @named shr.u32 run, bit, $6;
        @named mad.wide.u32 at, run, 4, $5;
        @named ld.global.b32 name, [at];
        @named sub.s32 name, name, run;
        @named shl.b32 name, name, $6;
        @named add.s32 bit, bit, name;
        st.global.b32 [id], bit;
        add.s64 id, id, 4;
        sub.s32 room, room, 1;
        sub.s32 bit, word, 1;
        and.b32 word, word, bit;
        bra next;
        end:
        mov.b32 $0, room;
        }""",
        "=r,r,r,l,r,l,r",
        [word, first, ids.to(tl.int64), room, names.to(tl.int64), SHIFT],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
