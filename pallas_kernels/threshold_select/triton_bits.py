"""Bitmaps: the marks of a row's tiles as 32-bit words, their union, and the lists that they make.

`plan` is the SearchedRow of triton_tiles up to `trim`, and from `unite` on the Lists of
triton_kernel.
"""

import triton
import triton.language as tl

ALL_TIES = tl.constexpr(2**31 - 1)


@triton.jit
def mark(x, words, t, ties, plan: tl.constexpr):
    """Writes the bits of a tile's entries that are at least t, and apart of those that equal it if
    some of these go.
    """
    at = word_index(plan)
    tl.store(words + at, pack(x >= t, plan))
    if ties != ALL_TIES:
        tl.store(words + plan.words + at, pack(x == t, plan))


@triton.jit
def pack(marks, plan: tl.constexpr):
    """A tile of marks as 32-bit words [T / 8, R]; word w of run r covers entries 32·(r·T/8 + w) and
    on.
    """
    nibbles = tl.sum(marks.to(tl.uint32) << tl.arange(0, 4).to(tl.uint32)[None, None, :], 2)
    shift = (tl.arange(0, 8) * 4).to(tl.uint32)[None, :, None]
    return tl.sum(tl.reshape(nibbles, [plan.threads // 8, 8, plan.runs]) << shift, 1)


@triton.jit
def word_index(plan: tl.constexpr):
    """Where the words of `pack` lie in the tile's part of the bitmap."""
    WORDS: tl.constexpr = plan.threads // 8
    return tl.arange(0, plan.runs)[None, :] * WORDS + tl.arange(0, WORDS)[:, None]


@triton.jit
def trim(words, length, ties, plan: tl.constexpr):
    """Takes from a bitmap what equals the threshold but for the first `ties`."""
    for start in range(0, tl.cdiv(length, 32), plan.threads):
        at = start + tl.arange(0, plan.threads)
        inside = at * 32 < length
        equal = tl.load(words + plan.words + at, mask=inside, other=0)
        number = ones(equal)
        word = tl.load(words + at, mask=inside, other=0) ^ equal
        tl.store(
            words + at, word | lowest(equal, ties - (tl.cumsum(number, 0) - number)), mask=inside
        )
        ties -= tl.sum(number, 0)


@triton.jit
def ones(word):
    """How many bits are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def lowest(word, number):
    """The lowest `number` set bits."""
    kept = word ^ word
    for bit in tl.static_range(32):
        one = (word >> bit) & 1
        kept |= tl.where(number > 0, one << bit, 0)
        number -= one.to(tl.int32)
    return kept


@triton.jit
def unite(words, length, plan: tl.constexpr):
    """Writes the union of a head's bitmaps over the first."""
    for start in range(0, tl.cdiv(length, 32), plan.row.threads):
        at = start + tl.arange(0, plan.row.threads)
        inside = at * 32 < length
        word = tl.load(words + at, mask=inside, other=0)
        for g in range(1, plan.rows):
            word |= tl.load(words + 2 * g * plan.row.words + at, mask=inside, other=0)
        tl.store(words + at, word, mask=inside)


@triton.jit
def list_entries(words, length, names, ids, plan: tl.constexpr):
    """Writes the names of marked entries, ascending, up to the capacity, and returns their number;
    a tile's words at once.
    """
    T: tl.constexpr = plan.row.threads
    EACH: tl.constexpr = plan.words_each
    total = length * 0
    for start in range(0, tl.cdiv(length, 32), T * EACH):
        at = start + tl.arange(0, T)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        word = tl.load(words + at, mask=at * 32 < length, other=0)
        number = ones(word)
        in_thread = tl.sum(number, 1)
        slot = (
            total + (tl.cumsum(in_thread, 0) - in_thread)[:, None] + tl.cumsum(number, 1) - number
        )
        list_bits(word, at * 32, ids + slot, plan.capacity - slot, names, plan.shift)
        total += tl.sum(in_thread, 0)
    return total


@triton.jit
def list_bits(word, first, ids, room, names, SHIFT: tl.constexpr):
    """Writes `name` of first + b for every set bit b, ascending, at most `room` of them. Few bits
    are set as a rule, so each warp loops as often as its fullest word needs, for which Triton has
    no words.
    """
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


@triton.jit
def list_pages(words, kept, length, names, ids, bits, CUT: tl.constexpr, plan: tl.constexpr):
    """Writes the names of the pages that hold a marked entry, and their bits, up to the capacity,
    and returns how many there are; of a list that is CUT, those in the bitmap `kept`.
    """
    T: tl.constexpr = plan.row.threads
    total = length * 0
    for start in range(0, tl.cdiv(length, plan.entries), T):
        page = start + tl.arange(0, T)
        marked = unit_bits(words, page, length, plan.entries)
        listed = marked != 0
        if CUT:
            word = tl.load(kept + page // 32, mask=listed, other=0)
            listed &= (word >> (page % 32).to(tl.uint32)) & 1 == 1
        number = listed.to(tl.int32)
        slot = total + tl.cumsum(number, 0) - number
        inside = listed & (slot < plan.capacity)
        tl.store(ids + slot, name(page, inside, names, plan.shift), mask=inside)
        if plan.with_bits:
            tl.store(bits + slot, marked, mask=inside)
        total += tl.sum(number, 0)
    return total


@triton.jit
def name(unit, inside, names, SHIFT: tl.constexpr):
    """What units are listed as: where SHIFT is below 0, their indices."""
    if SHIFT >= 0:
        run = unit >> SHIFT
        unit += (tl.load(names + run, mask=inside, other=0) - run) << SHIFT
    return unit


@triton.jit
def unit_bits(words, unit, length, SIZE: tl.constexpr):
    """The marked entries of each unit, as bits; of more than 32 entries, some word that is 0 only
    if none is marked.
    """
    if SIZE < 32:
        word = tl.load(words + unit * SIZE // 32, mask=unit * SIZE < length, other=0)
        return (word >> (unit * SIZE % 32).to(tl.uint32)) & ((1 << SIZE) - 1)
    bits = tl.load(words + unit * (SIZE // 32), mask=unit * SIZE < length, other=0)
    for more in tl.static_range(1, SIZE // 32):
        bits |= tl.load(
            words + unit * (SIZE // 32) + more, mask=unit * SIZE + more * 32 < length, other=0
        )
    return bits
