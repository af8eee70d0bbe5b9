"""Implements `api.page_bounds` for 8-bit bounds with jax-triton; pages are the rows of the MMAs.

Codes become float16 by permuting bytes, two at a time: the byte 0x64 above a byte n makes the
float16 1024 + n. A 16-bit word has the codes of channels 2w and 2w + 1, so even and odd channels
are separate, also in the query. Positive channels of the query meet the upper codes, negative ones
the lower. A slack below 1 adds columns, as for bounds in K's dtype.

The contributions of 1024 and of the page's zero are multiples of the sum of the query's channels.
Subtracting them after the MMA costs the sum two bits, and tensor cores truncate its last bits
instead of rounding. Queries are scaled by a power of two into float16's upper range, where bfloat16
and float16 lose nothing significant. In a frame, times key_scale, they are rounded to float16, and
a previous launch computes the contribution of the frame's mid. A page's score comes from one row of
one tile, so neither tiling nor batch size changes its bits.
"""

import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32

from jsparse.cache import LayerCache, key_constants
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.key_bounds import PageBounds8
from jsparse.pallas_kernels.mean_query_triton import load_queries
from jsparse.pallas_kernels.page_bounds.triton_gpu import (
    BoundsTiling,
    by_head,
    default_tiling,
    launch,
)
from jsparse.pallas_kernels.span_terms_triton import span_terms

SPAN = tl.constexpr(key_constants.SPAN)


def page_bounds(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    bounds: PageBounds8,
    *,
    slack: float,
    group: str,
    sm_scale: float,
    frame: KeyFrame | None = None,
    tiling: BoundsTiling | None = None,
) -> Float32[Array, "B K M"]:
    """Implements `api.page_bounds` for 8-bit bounds with jax-triton."""
    half = q.shape[2] // 2
    constants = {
        "SCALE": sm_scale,
        "K": layer.lengths.shape[1],
        "WORDS": half,
        "WIDTH": max(16, triton.next_power_of_2(half)),
        "FRAMED": frame is not None,
    }
    tiling = tiling or default_tiling(q.shape[2], 1)
    absent = layer.lengths  # placeholder for missing arrays; never read
    members = q.shape[1] // layer.lengths.shape[1]
    mean = members if group == "mean" else 1
    of_frame = (absent,) * 2
    if frame is not None:
        of_frame = frame.key_scale, span_terms(q, frame, members // mean, mean)
    return launch(codes_kernel, q, bounds, layer, tiling, slack, group, constants, of_frame)


@triton.jit
def _operands(words):
    """Unpacks each word's two codes into the float16 1024 + n."""
    # A 32-bit register has two words (pack=2). prmt selects bytes by the digits of its last
    # operand, lowest first: 0 to 3 are the words' bytes, 4 is 0x64.
    return tl.inline_asm_elementwise(
        """{
        prmt.b32 $0, $2, 0x64646464, 0x4240;
        prmt.b32 $1, $2, 0x64646464, 0x4341;
        }""",
        constraints="=&r,=r,r",
        args=[words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _query(
    q_ptr,
    key_scale_ptr,
    pair,
    K: tl.constexpr,
    G: tl.constexpr,
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAMED: tl.constexpr,
):
    """Loads the queries of one KV head, scaled, with signs and even and odd channels separated.

    Returns even and odd channels [WIDTH, COLS] of the positive parts, then of the negative ones;
    per column the sum of its channels, each counted once per code that it meets; and the unit of
    them all.
    """
    col, channel = tl.arange(0, COLS), tl.arange(0, 2 * WIDTH)
    head, whole = col // EACH, col % EACH == 1
    at = (pair * G + head)[:, None] * (MEAN * 2 * WORDS) + channel[None, :]
    inside = (head < G)[:, None] & (channel < 2 * WORDS)[None, :]
    q = load_queries(q_ptr + at, inside, 2 * WORDS, MEAN).to(tl.float32)
    if FRAMED:
        # the two channels of a rotated pair, which share a key_scale, are WORDS apart
        reach_at = key_scale_ptr + pair % K * WORDS + channel % WORDS
        q *= tl.load(reach_at, mask=channel < 2 * WORDS, other=0.0)[None, :]
    # Exponents: the group's largest channel is scaled to [2^14, 2^15), and `unit` undoes that. From
    # 24 on neither factor is subnormal or infinite.
    exponent = tl.maximum(tl.max(tl.max(tl.abs(q), 1), 0).to(tl.int32, bitcast=True) >> 23, 24)
    q = (q * ((268 - exponent) << 23).to(tl.float32, bitcast=True)).to(tl.float16)
    unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    zeros = tl.zeros_like(q)
    positive = tl.where((q > 0) | whole[:, None], q, zeros)
    negative = tl.where((q < 0) | whole[:, None], q, zeros)
    even, odd = tl.split(tl.reshape(positive, [COLS, WIDTH, 2]))
    even_low, odd_low = tl.split(tl.reshape(negative, [COLS, WIDTH, 2]))
    total = tl.sum(q.to(tl.float32), 1) * tl.where(whole, 2, 1)
    return tl.trans(even), tl.trans(odd), tl.trans(even_low), tl.trans(odd_low), total, unit


@triton.jit
def codes_kernel(
    q_ptr,  # [B, N, 2 · WORDS]
    low_ptr,  # [pages, 2 · WORDS]
    high_ptr,  # [pages, 2 · WORDS]
    affine_ptr,  # [pages, 2]
    lengths_ptr,  # [B, K]
    table_ptr,  # [B, K, M]
    key_scale_ptr,  # [K, WORDS]
    terms_ptr,  # [B, K, spans, G]
    out_ptr,  # [B, K, M]
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    MEAN: tl.constexpr,
    SLACK: tl.constexpr,
    EACH: tl.constexpr,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    FRAMED: tl.constexpr,
):
    """Scores TILES tiles of one KV head; tiles past the head's length are filled with -inf."""
    pair = tl.program_id(1)
    first = tl.program_id(0) * (BLOCK * TILES)
    last = tl.minimum(first + BLOCK * TILES, M)
    row, word = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    even, odd, even_low, odd_low, total, unit = _query(
        q_ptr, key_scale_ptr, pair, K, G, MEAN, EACH, COLS, WORDS, WIDTH, FRAMED
    )
    unit *= SCALE
    used = tl.minimum(tl.cdiv(tl.load(lengths_ptr + pair), P), M)
    # one load for a word of two codes, and one for scale and zero together
    low_ptr = low_ptr.to(tl.pointer_type(tl.int16))
    high_ptr = high_ptr.to(tl.pointer_type(tl.int16))
    affine_ptr = affine_ptr.to(tl.pointer_type(tl.int32))
    if not HAS_TABLE:
        low_ptr += pair.to(tl.int64) * (M * WORDS)
        high_ptr += pair.to(tl.int64) * (M * WORDS)
        affine_ptr += pair.to(tl.int64) * M
    out_ptr += pair.to(tl.int64) * M
    tiles = tl.maximum(tl.cdiv(tl.minimum(used, last) - first, BLOCK), 0)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        page = first + tile * BLOCK + row
        # past the last page, read it again: no mask needed
        near = tl.minimum(page, used - 1)
        if HAS_TABLE:
            near = tl.load(table_ptr + pair * M + near).to(tl.int64)
        at = near[:, None] * WORDS + word[None, :]
        if WIDTH == WORDS:
            high = tl.load(high_ptr + at)
            low = tl.load(low_ptr + at)
        else:
            high = tl.load(high_ptr + at, mask=(word < WORDS)[None, :])
            low = tl.load(low_ptr + at, mask=(word < WORDS)[None, :])
        affine = tl.load(affine_ptr + near)
        # bfloat16 is the upper half of a float32: scale is in the low half, zero in the high half
        scale = (affine << 16).to(tl.float32, bitcast=True) * unit
        zero = (affine & -0x10000).to(tl.float32, bitcast=True) * unit
        high_even, high_odd = _operands(high)
        low_even, low_odd = _operands(low)
        dot = tl.dot(high_even, even)
        dot = tl.dot(high_odd, odd, dot)
        dot = tl.dot(low_even, even_low, dot)
        dot = tl.dot(low_odd, odd_low, dot)
        scores = scale[:, None] * (dot - 1024 * total[None, :]) + zero[:, None] * total[None, :]
        scores = by_head(scores, SLACK, EACH, COLS)
        head = tl.arange(0, COLS // EACH)[None, :]
        if FRAMED:
            spans: tl.constexpr = (M * P + SPAN - 1) // SPAN
            span = (page * P // SPAN)[:, None]
            terms_at = (pair.to(tl.int64) * spans + span) * G + head
            terms = tl.load(terms_ptr + terms_at, mask=(head < G) & (page < used)[:, None], other=0)
            scores += SCALE * terms
        best = tl.max(tl.where(head < G, scores, float("-inf")), 1)
        tl.store(out_ptr + page, tl.where(page < used, best, float("-inf")), mask=page < M)
    for tile in range(tiles, tl.cdiv(last - first, BLOCK)):
        page = first + tile * BLOCK + row
        tl.store(out_ptr + page, tl.full([BLOCK], float("-inf"), tl.float32), mask=page < M)
