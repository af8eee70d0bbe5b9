"""Implements `api.int4_append` with jax-triton, in one launch for codes, scales and zeros.

A program appends tokens of one head, in place. At one token per step, the time is that of dependent
loads. A token's location and its channels are loaded in parallel, so only the block table's load is
dependent. A frame's angles wait for the slot's load, and listed channels for the channel's, in
parallel with the table's. The two codes of a byte belong to one token, so no two programs write the
same byte.

A program's tokens are in at most two adjacent spans, so it rotates the mean key twice, not per
token.

Codes are rounded by adding 2^23 to a float32 in 0 … 15, which rounds half to even; the lowest bits
of the sum are the code.

In a frame, a product of the rotation may be fused with its sum, also in the reference, and the
division by key_scale is a product with a reciprocal. A channel may therefore be an ulp of float32
off, and halfway between two codes it may get either.
"""

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Int32

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import SPAN as TOKENS_PER_SPAN
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels import int4_keys
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.shapes import ChunkKV, Lengths, Rows

TILE = 4096  # maximum channels per program
PER_WARP = 1024  # channels per warp: 32 per thread
LEVELS = tl.constexpr(int4_keys.LEVELS)
FLOAT16_MAX = tl.constexpr(int4_keys.FLOAT16_MAX)
SPAN = tl.constexpr(TOKENS_PER_SPAN)


def int4_append(
    keys: Int4Keys,
    layer: LayerCache,
    k: ChunkKV,
    valid: Rows,
    first: Lengths,
    *,
    frame: KeyFrame | None = None,
    channels: Int32[Array, "B K r"] | None = None,
) -> Int4Keys:
    """Implements `api.int4_append` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    if k.size == 0:
        return keys
    _, steps, heads, head_dim = k.shape
    count = 2 * keys.packed.shape[-1]
    cols = triton.next_power_of_2(count)
    tokens = min(triton.next_power_of_2(steps), max(TILE // cols, 1), TOKENS_PER_SPAN)
    table = layer.block_table
    absent = first  # placeholder for missing arrays; never read
    given = (
        k.astype(layer.k.dtype),
        valid,
        first,
        absent if table is None else table,
        *((absent,) * 3 if frame is None else frame),
        absent if channels is None else channels,
    )
    pools = triton_call(
        *given,
        *keys,
        kernel=append_kernel,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in keys],
        input_output_aliases={len(given) + nth: nth for nth in range(len(keys))},
        grid=(first.size, triton.cdiv(steps, tokens)),
        num_warps=triton.cdiv(tokens * cols, PER_WARP),
        T=steps,
        K=heads,
        H=head_dim,
        R=count,
        M=layer.num_pages,
        P=layer.page_size,
        TOKENS=tokens,
        COLS=cols,
        HAS_TABLE=table is not None,
        FRAMED=frame is not None,
        HAS_CHANNELS=channels is not None,
    )
    return Int4Keys(*pools)


@triton.jit
def _rotated(mid, partner, angles_ptr, slot, real, H: tl.constexpr, SLOTS: tl.constexpr):
    """Rotates the mean key to the span of a slot, or to the last span."""
    angles_ptr += tl.minimum(tl.maximum(slot, 0), SLOTS - 1) // SPAN * H
    cos = tl.load(angles_ptr, mask=real, other=0)
    sin = tl.load(angles_ptr + H // 2, mask=real, other=0)
    return mid * cos + partner * sin


@triton.jit
def append_kernel(
    k_ptr,  # [B, T, K, H]
    valid_ptr,  # [B]
    first_ptr,  # [B, K]
    table_ptr,  # [B, K, M]
    mid_ptr,  # [K, H]
    key_scale_ptr,  # [K, H / 2]
    angles_ptr,  # [spans, H]
    channels_ptr,  # [B, K, R]
    _packed_given,  # aliases of the last three
    _scale_given,
    _zero_given,
    packed_ptr,  # [pages, P, R / 2]
    scale_ptr,  # [pages, P]
    zero_ptr,  # [pages, P]
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    FRAMED: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
):
    """Appends TOKENS tokens of one head."""
    pair = tl.program_id(0)
    row = pair // K
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(first_ptr + pair) + token
    ok = (token < tl.minimum(tl.load(valid_ptr + row), T)) & (slot >= 0) & (slot < M * P)

    column, half = tl.arange(0, COLS), tl.arange(0, COLS // 2)[None, :]
    real = column < R
    channel = column
    if HAS_CHANNELS:
        channel = tl.load(channels_ptr + pair * R + column, mask=real, other=0)
    lies = ((row.to(tl.int64) * T + token) * K + pair % K)[:, None] * H + channel[None, :]
    k = tl.load(k_ptr + lies, mask=(token < T)[:, None] & real[None, :], other=0).to(tl.float32)
    if FRAMED:
        low = channel < H // 2
        nth = tl.where(low, channel, channel - H // 2)  # index in the rotated pair
        mid_ptr += pair % K * H
        mid = tl.load(mid_ptr + channel, mask=real, other=0)
        partner = tl.load(mid_ptr + tl.where(low, channel + H // 2, nth), mask=real, other=0)
        partner = tl.where(low, -partner, partner)
        reach = tl.load(key_scale_ptr + pair % K * (H // 2) + nth, mask=real, other=1)
        begin = tl.load(first_ptr + pair) + tl.program_id(1) * TOKENS
        angles_ptr += nth
        mean = _rotated(mid, partner, angles_ptr, begin, real, H, M * P)
        if TOKENS > 1:
            end = begin + TOKENS - 1
            after = _rotated(mid, partner, angles_ptr, end, real, H, M * P)
            later = (slot >= end // SPAN * SPAN)[:, None]
            k -= tl.where(later, after[None, :], mean[None, :])
        else:
            k -= mean[None, :]
        k *= tl.div_rn(1.0, reach)[None, :]
    k = tl.minimum(tl.maximum(k, -FLOAT16_MAX), FLOAT16_MAX)
    lowest = tl.min(tl.where(real[None, :], k, float("inf")), 1)
    span = tl.max(tl.where(real[None, :], k, float("-inf")), 1) - lowest
    # bitwise equal to int4_keys.quantise on a CPU
    zero = lowest.to(tl.float16)
    scale = (span * (1 / LEVELS)).to(tl.float16)
    scale = tl.where(scale == 0, 1.0, scale)
    steps = (k - zero.to(tl.float32)[:, None]) * tl.div_rn(1.0, scale.to(tl.float32))[:, None]
    steps = tl.minimum(tl.maximum(steps, 0.0), LEVELS)
    # 8388608 is 2^23
    codes = (steps + 8388608.0).to(tl.int32, bitcast=True) & LEVELS
    even, odd = tl.split(tl.reshape(codes, [TOKENS, COLS // 2, 2]))

    page = pair.to(tl.int64) * M + slot // P
    if HAS_TABLE:
        page = tl.load(table_ptr + page, mask=ok, other=0).to(tl.int64)
    at = page * P + slot % P
    tl.store(
        packed_ptr + at[:, None] * (R // 2) + half,
        even | (odd << 4),
        mask=ok[:, None] & (half < R // 2),
    )
    tl.store(scale_ptr + at, scale, mask=ok)
    tl.store(zero_ptr + at, zero, mask=ok)
