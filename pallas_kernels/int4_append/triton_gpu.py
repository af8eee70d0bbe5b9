"""Implements `api.int4_append` with jax-triton, in one launch for codes, scales and zeros.

A program appends tokens of one head, in place. Where a token goes and what it holds are loaded side
by side: at one token per step, time is that of the loads which wait for each other, and only the
block table's does. A byte's two codes are of one token, so no two programs share one.

2^23 plus a float32 in 0 … 15 is rounded to an integer, half to even: the sum's lowest bits are the
code.
"""

import jax
import triton
import triton.language as tl

from jsparse.cache import LayerCache
from jsparse.pallas_kernels import int4_keys
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.shapes import ChunkKV, Lengths, Rows

TILE = 4096  # most channels per program
PER_WARP = 1024  # channels per warp: 32 per thread
LEVELS = tl.constexpr(int4_keys.LEVELS)
FLOAT16_MAX = tl.constexpr(int4_keys.FLOAT16_MAX)


def int4_append(
    keys: Int4Keys, layer: LayerCache, k: ChunkKV, valid: Rows, first: Lengths
) -> Int4Keys:
    """Implement `api.int4_append` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    if k.size == 0:
        return keys
    _, steps, heads, channels = k.shape
    cols = triton.next_power_of_2(channels)
    tokens = min(triton.next_power_of_2(steps), max(TILE // cols, 1))
    table = layer.block_table
    pools = triton_call(
        *(k.astype(layer.k.dtype), valid, first),
        first if table is None else table,  # not read under the identity
        *keys,
        kernel=append_kernel,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in keys],
        input_output_aliases={4 + nth: nth for nth in range(len(keys))},
        grid=(first.size, triton.cdiv(steps, tokens)),
        num_warps=triton.cdiv(tokens * cols, PER_WARP),
        T=steps,
        K=heads,
        H=channels,
        M=layer.num_pages,
        P=layer.page_size,
        TOKENS=tokens,
        COLS=cols,
        HAS_TABLE=table is not None,
    )
    return Int4Keys(*pools)


@triton.jit
def append_kernel(
    k_ptr,  # [B, T, K, H]
    valid_ptr,  # [B]
    first_ptr,  # [B, K]
    table_ptr,  # [B, K, M]
    _packed_given,  # the pools given: they share their memory with the last three
    _scale_given,
    _zero_given,
    packed_ptr,  # [pages, P, H / 2]
    scale_ptr,  # [pages, P]
    zero_ptr,  # [pages, P]
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Append TOKENS tokens of one head."""
    pair = tl.program_id(0)
    row = pair // K
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(first_ptr + pair) + token
    ok = (token < tl.minimum(tl.load(valid_ptr + row), T)) & (slot >= 0) & (slot < M * P)

    channel, half = tl.arange(0, COLS)[None, :], tl.arange(0, COLS // 2)[None, :]
    real = channel < H
    lies = ((row.to(tl.int64) * T + token) * K + pair % K)[:, None] * H + channel
    k = tl.load(k_ptr + lies, mask=(token < T)[:, None] & real, other=0).to(tl.float32)
    k = tl.minimum(tl.maximum(k, -FLOAT16_MAX), FLOAT16_MAX)
    least = tl.min(tl.where(real, k, float("inf")), 1)
    span = tl.max(tl.where(real, k, float("-inf")), 1) - least
    # bit for bit what int4_keys.quantise gives on a CPU
    zero = least.to(tl.float16)
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
        packed_ptr + at[:, None] * (H // 2) + half,
        even | (odd << 4),
        mask=ok[:, None] & (half < H // 2),
    )
    tl.store(scale_ptr + at, scale, mask=ok)
    tl.store(zero_ptr + at, zero, mask=ok)
