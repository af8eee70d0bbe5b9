"""Implements `api.int4_scores` with jax-triton, with tokens as the rows of the MMA.

Codes become float16 by masking alone. A 16-bit word has the codes of four channels. Masked and
combined with 0x6400 (the bits of 1024), code n in bits 0-3 is the float16 1024 + n, and in bits 4-7
it is 1024 + 16·n. One instruction makes two operands; after a shift by a byte, another makes the
other two. The offset of 1024 is subtracted after the MMA, and the factor of 16 divided out of the
query. The query's channels are arranged like the words': channel 4w + j belongs to the jth code of
word w. If keys have fewer words than an MMA needs, two or four adjacent tokens share a row. Each
query then has one column per token, which meets only that token's words.

In a frame, the query's channels are multiplied by key_scale, and a previous launch computes the
term of every span and query that is added to the span's scores. Queries are scaled by a power of
two into float16's upper range, so that every channel keeps 11 bits, whatever the dtype. A token's
score comes from one row of one tile, so neither tiling nor batch size changes its bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import LayerCache, key_constants
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.pallas_kernels.span_terms_triton import span_terms
from jsparse.selection import Selection

SPAN = tl.constexpr(key_constants.SPAN)
LEAST_WORDS, MAX_TOKENS = 16, 4  # minimum K of a float16 MMA; tokens per row


class ScoresTiling(NamedTuple):
    """Division of the work; results are bitwise independent of it.

    Attributes:
        block: tokens per tile, in whole pages. With 64 rows per warp each thread loads at least two
            scales: 4 bytes, the minimum of an asynchronous copy.
        max_tiles: maximum tiles per program.
        programs: programs per SM before any program gets more than one tile.
        num_warps: warps per program.
        ahead: tiles prefetched.
    """

    block: int = 128
    max_tiles: int = 16
    programs: int = 8
    num_warps: int = 2
    ahead: int = 2


def int4_scores(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    keys: Int4Keys,
    selection: Selection | None,
    *,
    sm_scale: float,
    frame: KeyFrame | None = None,
    channels: Int32[Array, "B K r"] | None = None,
    tiling: ScoresTiling | None = None,
) -> Float32[Array, "B N slots"]:
    """Implements `api.int4_scores` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads), head_dim = layer.lengths.shape, q.shape[2]
    width, group = 2 * keys.packed.shape[-1], q.shape[1] // heads
    terms = max(8, triton.next_power_of_2(group))
    tokens = tokens_of_row(width // 4, layer.page_size)
    tiling = ScoresTiling(block=128 * tokens) if tiling is None else tiling
    entries = layer.num_pages if selection is None else selection.ids.shape[2]
    shape = (batch, q.shape[1], entries * layer.page_size)
    if not shape[2]:
        return jnp.zeros(shape, jnp.float32)
    tiles = triton.cdiv(shape[2], tiling.block)
    everywhere = tiling.programs * jax.local_devices()[0].core_count
    per_program = min(triton.cdiv(tiles * batch * heads, everywhere), tiling.max_tiles)
    absent = layer.lengths  # placeholder for missing arrays; never read
    bits = None if selection is None else selection.bits
    chained = 1 + (selection is not None) + (layer.block_table is not None)  # dependent loads
    inputs = (
        q,
        *keys,
        layer.lengths,
        absent if selection is None else selection.ids,
        absent if selection is None else selection.count,
        absent if bits is None else bits,
        absent if layer.block_table is None else layer.block_table,
        absent if channels is None else channels,
        absent if frame is None else frame.key_scale,
        absent if frame is None else span_terms(q, frame, terms),
    )
    return triton_call(
        *inputs,
        kernel=scores_kernel,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(triton.cdiv(tiles, per_program), batch * heads),
        num_warps=tiling.num_warps,
        STAGES=1 + tiling.ahead * chained,
        SCALE=sm_scale,
        BLOCK=tiling.block,
        TILES=per_program,
        ENTRIES=entries,
        M=layer.num_pages,
        P=layer.page_size,
        K=heads,
        G=group,
        TOKENS=tokens,
        COLS=max(8, tokens * triton.next_power_of_2(group)),  # 8 is the minimum N of an MMA
        TERMS=terms,
        H=head_dim,
        R=width,
        WORDS=max(LEAST_WORDS, triton.next_power_of_2(width // 4)),
        # a page is in one span; with all pages, so are UNIT tokens
        UNIT=min(tiling.block, key_constants.SPAN) if selection is None else layer.page_size,
        SPANS=1 if frame is None else frame.angles.shape[0],
        FRAMED=frame is not None,
        HAS_CHANNELS=channels is not None,
        LISTED=selection is not None,
        HAS_BITS=bits is not None,
        HAS_TABLE=layer.block_table is not None,
    )


def tokens_of_row(words: int, page_size: int) -> int:
    """Returns the number of adjacent tokens of a page that share a row of an MMA."""
    tokens = min(max(LEAST_WORDS // words, 1), MAX_TOKENS)
    return tokens if words & (words - 1) == 0 and page_size % tokens == 0 else 1


@triton.jit
def _operands(words):
    """Unpacks each word's codes into the float16 1024 + n, 1024 + 16n, 1024 + n and 1024 + 16n."""
    # A 32-bit register has two words (pack=2). lop3 with 0xea is (a & b) | c: it masks both words'
    # codes and adds the exponent of 1024 at once.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 upper;
        shr.b32 upper, $4, 8;
        lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
        lop3.b32 $2, upper, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $3, upper, 0x00f000f0, 0x64006400, 0xea;
        }""",
        constraints="=&r,=&r,=&r,=&r,r",
        args=[words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _query(
    q_ptr,
    key_scale_ptr,
    channels_ptr,
    pair,
    K: tl.constexpr,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    FRAMED: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
):
    """Loads the queries of one KV head, scaled and arranged like the words of keys.

    Returns the four parts [WORDS, COLS]; per column the sum of its channels and the contribution of
    the 1024 offset to its products; and the unit of all three.
    """
    head, place = tl.arange(0, COLS) // TOKENS, tl.arange(0, COLS) % TOKENS
    column = tl.arange(0, 4 * WORDS)
    channel = column[None, :] - (place * R)[:, None]  # of the token at that position in a row
    real = (channel >= 0) & (channel < R)
    if HAS_CHANNELS:
        channel = tl.load(channels_ptr + pair * R + channel, mask=real, other=0)
    at = (pair * G + head)[:, None] * H + channel
    q = tl.load(q_ptr + at, mask=(head < G)[:, None] & real, other=0.0).to(tl.float32)
    if FRAMED:
        nth = tl.where(channel < H // 2, channel, channel - H // 2)
        q *= tl.load(key_scale_ptr + pair % K * (H // 2) + nth, mask=real, other=0.0)
    # Exponents: the group's largest channel is scaled to [2^14, 2^15), and `unit` undoes that. From
    # 24 on neither factor is subnormal or infinite.
    exponent = tl.maximum(tl.max(tl.max(tl.abs(q), 1), 0).to(tl.int32, bitcast=True) >> 23, 24)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    odd = (column % 2 == 1)[None, :]
    # odd channels meet codes multiplied by 16
    q = (q * tl.where(odd, up / 16, up)).to(tl.float16)
    wide = q.to(tl.float32)
    offset = 1024 * tl.sum(wide, 1)
    total = tl.sum(tl.where(odd, 16 * wide, wide), 1)
    # channel 4w + 2a + b is [w, a, b]; split divides the last axis, so b first and then a
    evens, odds = tl.split(tl.reshape(q, [COLS, WORDS, 2, 2]))
    q0, q2 = tl.split(evens)
    q1, q3 = tl.split(odds)
    return tl.trans(q0), tl.trans(q1), tl.trans(q2), tl.trans(q3), total, offset, unit


@triton.jit
def scores_kernel(
    q_ptr,  # [B, N, H]
    packed_ptr,  # [pages, P, R / 2]
    scale_ptr,  # [pages, P]
    zero_ptr,  # [pages, P]
    lengths_ptr,  # [B, K]
    ids_ptr,  # [B, K, ENTRIES]
    count_ptr,  # [B, K]
    bits_ptr,  # [B, K, ENTRIES]
    table_ptr,  # [B, K, M]
    channels_ptr,  # [B, K, R]
    key_scale_ptr,  # [K, H / 2]
    terms_ptr,  # [B, K, SPANS, TERMS]
    out_ptr,  # [B, N, ENTRIES · P]
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    ENTRIES: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    TERMS: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    SPANS: tl.constexpr,
    FRAMED: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    LISTED: tl.constexpr,
    HAS_BITS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Scores TILES tiles of one KV head; tiles past the head's length are filled with -inf."""
    pair = tl.program_id(1)
    first = tl.program_id(0) * (BLOCK * TILES)
    last = tl.minimum(first + BLOCK * TILES, ENTRIES * P)
    q0, q1, q2, q3, total, offset, unit = _query(
        q_ptr,
        key_scale_ptr,
        channels_ptr,
        pair,
        K,
        G,
        TOKENS,
        COLS,
        H,
        R,
        WORDS,
        FRAMED,
        HAS_CHANNELS,
    )
    unit *= SCALE
    length = tl.load(lengths_ptr + pair)
    used = tl.load(count_ptr + pair) if LISTED else tl.minimum(tl.cdiv(length, P), M)
    ROWS: tl.constexpr = BLOCK // TOKENS
    row, col, word = tl.arange(0, ROWS) * TOKENS, tl.arange(0, COLS), tl.arange(0, WORDS)
    slot, place, head = row % P, (tl.arange(0, TOKENS))[None, :], (col // TOKENS)[None, :]
    words_ptr = packed_ptr.to(tl.pointer_type(tl.int16))  # [pages, P, R / 4]
    if not HAS_TABLE:
        rows = pair.to(tl.int64) * (M * P)
        words_ptr += rows * (R // 4)
        scale_ptr += rows
        zero_ptr += rows
    to_ptr = out_ptr + (pair * G + head).to(tl.int64) * (ENTRIES * P) + (col % TOKENS)[None, :]
    tiles = tl.maximum(tl.cdiv(tl.minimum(used * P, last) - first, BLOCK), 0)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        entry = first // P + tile * (BLOCK // P) + row // P
        # past the last page, read it again: no mask needed
        near = tl.minimum(entry, used - 1)
        page = near
        if LISTED:
            page = tl.load(ids_ptr + pair * ENTRIES + near)
        # [ROWS, TOKENS]: per token
        seen = ((page * P + slot)[:, None] + place < length) & (entry < used)[:, None]
        if HAS_BITS:
            bits = tl.load(bits_ptr + pair * ENTRIES + near)[:, None]
            seen &= (bits >> (slot[:, None] + place).to(tl.uint32)) & 1 != 0
        if HAS_TABLE:
            page = tl.load(table_ptr + pair * M + page).to(tl.int64)
        if TOKENS == 1:
            at = tl.max_contiguous(tl.multiple_of(page * P + slot, P), P)
        else:
            at = tl.multiple_of(page * P + slot, TOKENS)
        words_at = words_ptr + at[:, None] * (R // 4) + word[None, :]
        words = (
            tl.load(words_at)
            if WORDS == TOKENS * (R // 4)
            else tl.load(words_at, mask=(word < TOKENS * (R // 4))[None, :])
        )
        scale = tl.load(scale_ptr + at[:, None] + place).to(tl.float32) * unit
        zero = tl.load(zero_ptr + at[:, None] + place).to(tl.float32) * unit
        k0, k1, k2, k3 = _operands(words)
        # [ROWS, COLS]: Σ q·code of the scaled query, and `offset`
        dot = tl.dot(k0, q0)
        dot = tl.dot(k1, q1, dot)
        dot = tl.dot(k2, q2, dot)
        dot = tl.dot(k3, q3, dot)
        hidden = _by_column(tl.where(seen, 0.0, float("-inf")), COLS)
        scores = (dot - offset[None, :]) * _by_column(scale, COLS)
        scores += total[None, :] * _by_column(zero, COLS) + hidden
        if FRAMED:
            UNITS: tl.constexpr = BLOCK // UNIT
            nth = first // UNIT + tile * UNITS + tl.arange(0, UNITS)
            if LISTED:
                nth = tl.load(ids_ptr + pair * ENTRIES + tl.minimum(nth, used - 1))
            span = tl.minimum(nth * UNIT // SPAN, SPANS - 1)
            own = tl.load(terms_ptr + ((pair * SPANS + span) * TERMS)[:, None] + head)
            spread = tl.broadcast_to((SCALE * own)[:, None, :], [UNITS, UNIT // TOKENS, COLS])
            scores += tl.reshape(spread, [ROWS, COLS])
        to = (first + tile * BLOCK + row)[:, None]
        tl.store(to_ptr + to, scores, mask=(head < G) & (to < ENTRIES * P))
    for tile in range(tiles, tl.cdiv(last - first, BLOCK)):
        to = (first + tile * BLOCK + row)[:, None]
        nothing = tl.full([ROWS, COLS], float("-inf"), tl.float32)
        tl.store(to_ptr + to, nothing, mask=(head < G) & (to < ENTRIES * P))


@triton.jit
def _by_column(numbers, COLS: tl.constexpr):
    """Gives each column the number of its token: [rows, tokens] becomes [rows, COLS]."""
    ROWS: tl.constexpr = numbers.shape[0]
    TOKENS: tl.constexpr = numbers.shape[1]
    wide = tl.broadcast_to(numbers[:, None, :], [ROWS, COLS // TOKENS, TOKENS])
    return tl.reshape(wide, [ROWS, COLS])
