"""Implements `api.window_attention` with jax-triton, in two launches that both multiply Q and K.

The first computes the logsumexp of every query over each SPLIT slots, which XLA merges; the second
computes shares. No array has the size of the logits. A query's row is (index in the window, head of
the group), each padded to a power of two, so that the heads of a group are adjacent. The division
of a head depends only on its capacity, so the batch changes no bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Float32

from jsparse.cache import LayerCache, arrays_of
from jsparse.shapes import Rows

BLOCK = 64  # slots per tile
SPLIT = 256  # slots per program of the first launch
MAX_ROWS = 128  # query rows per tile


def window_attention(
    queries: Float[Array, "B W N H"],
    positions: Rows,
    layer: LayerCache,
    competing: Bool[Array, "B K S"],
    *,
    group: str,
    over: str,
) -> Float32[Array, "B K S"]:
    """Implements `api.window_attention` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, kv_heads), slots = layer.lengths.shape, layer.capacity
    size, heads, head_dim = queries.shape[1:]
    each = triton.next_power_of_2(heads // kv_heads)
    rows = max(triton.next_power_of_2(size) * each, 16)
    tile = min(max(MAX_ROWS, each), rows)
    absent = layer.lengths  # placeholder for missing arrays; never read
    k, scales, reach = arrays_of(layer.k)
    arrays = (
        queries,
        k,
        absent if scales is None else scales,
        absent if reach is None else reach,
        absent if layer.bias is None else layer.bias,
        absent if layer.block_table is None else layer.block_table,
        positions,
        layer.lengths,
        competing.astype(jnp.int8),
    )
    constants: dict[str, Any] = {
        "W": size,
        "N": heads,
        "K": kv_heads,
        "H": head_dim,
        "S": slots,
        "P": layer.page_size,
        "SCALE": head_dim**-0.5,
        "CHANNELS": max(16, triton.next_power_of_2(head_dim)),
        "EACH": each,
        "ROWS": rows,
        "TILE": tile,
        "BLOCK": BLOCK,
        "LARGEST": group == "max",
        "INT8": scales is not None,
        "HAS_REACH": reach is not None,
        "HAS_BIAS": layer.bias is not None,
        "HAS_TABLE": layer.block_table is not None,
        "PRECISION": "ieee" if queries.dtype == jnp.float32 else "tf32",
        "HELD": over == "held",
        "num_warps": 4,
        "num_stages": 2,
    }
    splits, sets = triton.cdiv(slots, SPLIT), rows // each if group == "max" else rows
    parts = triton_call(
        *arrays,
        kernel=lse_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, splits, sets), jnp.float32),
        grid=(splits, batch * kv_heads, rows // tile),
        SPLIT=SPLIT,
        **constants,
    )
    lse = jax.nn.logsumexp(parts, axis=2)
    return triton_call(
        *arrays,
        lse,
        kernel=shares_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.float32),
        grid=(triton.cdiv(slots, BLOCK), batch * kv_heads),
        **constants,
    )


@triton.jit
def load_queries(
    q_ptr,  # [B, W, N, H]
    positions_ptr,  # [B]
    pair,
    first,
    W: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns TILE query rows of one KV head [TILE, CHANNELS], a mask of existing ones, and ages.

    Ages are in tokens.
    """
    row, channel = first + tl.arange(0, TILE), tl.arange(0, CHANNELS)
    nth, head = row // EACH, row % EACH
    position = tl.load(positions_ptr + pair // K)
    asked = (nth < tl.minimum(position, W)) & (head < N // K)
    age = tl.where(asked, (position - 1 + W - nth) % W, 0)
    at = ((pair // K).to(tl.int64) * W + nth) * N + pair % K * (N // K) + head
    inside = asked[:, None] & (channel < H)[None, :]
    return tl.load(q_ptr + at[:, None] * H + channel[None, :], mask=inside, other=0.0), asked, age


@triton.jit
def logits_of(
    q,
    asked,
    age,
    k_ptr,  # [pages, P, H]
    scales_ptr,  # [pages, P], if keys are in 8 bits
    reach_ptr,  # [K, H]
    bias_ptr,  # [pages, P]
    table_ptr,  # [B, K, M]
    lengths_ptr,  # [B, K]
    competing_ptr,  # [B, K, S]
    pair,
    slot,
    K: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
    HAS_REACH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
):
    """Returns a tile of logits, [TILE, BLOCK], or with LARGEST [TILE // EACH, BLOCK].

    These are logits of competing slots, or with HELD of all slots up to each query's own; all
    others are -inf.
    """
    channel = tl.arange(0, CHANNELS)
    if HELD:
        length = tl.load(lengths_ptr + pair)
        seen = slot < length
        visible = slot[None, :] < (length - age)[:, None]
    else:
        seen = tl.load(competing_ptr + pair.to(tl.int64) * S + slot, mask=slot < S, other=0) != 0
        visible = seen[None, :]
    page = pair.to(tl.int64) * (S // P) + slot // P
    if HAS_TABLE:
        page = tl.load(table_ptr + page, mask=seen, other=0).to(tl.int64)
    at = page * P + slot % P
    # only these slots: others are ignored
    k = tl.load(
        k_ptr + at[:, None] * H + channel[None, :],
        mask=seen[:, None] & (channel < H)[None, :],
        other=0,
    )
    if INT8:
        scales = tl.load(scales_ptr + at, mask=seen, other=0).to(tl.float32)
        k = k.to(tl.float32) * scales[:, None]
        if HAS_REACH:
            own = reach_ptr + pair % K * H + channel
            k *= tl.load(own, mask=channel < H, other=0.0)[None, :]
        k = k.to(q.dtype)
    logits = SCALE * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + at, mask=seen, other=0.0)[None, :]
    logits = tl.where(asked[:, None] & visible, logits, float("-inf"))
    if LARGEST:
        logits = tl.max(tl.reshape(logits, [TILE // EACH, EACH, BLOCK]), 1)
    return logits


@triton.jit
def lse_kernel(
    q_ptr,
    k_ptr,
    scales_ptr,
    reach_ptr,
    bias_ptr,
    table_ptr,
    positions_ptr,
    lengths_ptr,
    competing_ptr,
    out_ptr,  # [B, K, splits, ROWS or ROWS // EACH]
    SPLIT: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    SCALE: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
    HAS_REACH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
):
    """Computes the logsumexp of a tile of query rows over one split of a head's slots."""
    split, pair, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, asked, age = load_queries(
        q_ptr, positions_ptr, pair, chunk * TILE, W, N, K, H, CHANNELS, EACH, TILE
    )
    SETS: tl.constexpr = TILE // EACH if LARGEST else TILE
    top = tl.full([SETS], float("-inf"), tl.float32)
    total = tl.zeros([SETS], tl.float32)
    for start in range(0, SPLIT, BLOCK):
        slot = split * SPLIT + start + tl.arange(0, BLOCK)
        logits = logits_of(
            q, asked, age, k_ptr, scales_ptr, reach_ptr, bias_ptr, table_ptr, lengths_ptr,
            competing_ptr, pair, slot, K, S, P, H, SCALE, CHANNELS, EACH, TILE, BLOCK, LARGEST,
            INT8, HAS_REACH, HAS_BIAS, HAS_TABLE, PRECISION,
            HELD=HELD,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        top = higher
    lse = tl.where(total > 0, top + tl.log(total), float("-inf"))
    per: tl.constexpr = ROWS // TILE * SETS
    at = (pair.to(tl.int64) * tl.num_programs(0) + split) * per + chunk * SETS
    tl.store(out_ptr + at + tl.arange(0, SETS), lse)


@triton.jit
def shares_kernel(
    q_ptr,
    k_ptr,
    scales_ptr,
    reach_ptr,
    bias_ptr,
    table_ptr,
    positions_ptr,
    lengths_ptr,
    competing_ptr,
    lse_ptr,  # [B, K, ROWS or ROWS // EACH]
    out_ptr,  # [B, K, S]
    W: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    SCALE: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
    HAS_REACH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
):
    """Averages the shares of one tile of slots over all query rows of a head."""
    pair = tl.program_id(1)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at_slot = pair.to(tl.int64) * S + slot
    SETS: tl.constexpr = TILE // EACH if LARGEST else TILE
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(0, ROWS // TILE):
        q, asked, age = load_queries(
            q_ptr, positions_ptr, pair, chunk * TILE, W, N, K, H, CHANNELS, EACH, TILE
        )
        logits = logits_of(
            q, asked, age, k_ptr, scales_ptr, reach_ptr, bias_ptr, table_ptr, lengths_ptr,
            competing_ptr, pair, slot, K, S, P, H, SCALE, CHANNELS, EACH, TILE, BLOCK, LARGEST,
            INT8, HAS_REACH, HAS_BIAS, HAS_TABLE, PRECISION,
            HELD=HELD,
        )  # fmt: skip
        at = pair.to(tl.int64) * (ROWS // TILE * SETS) + chunk * SETS + tl.arange(0, SETS)
        lse = tl.load(lse_ptr + at)
        lse = tl.where(lse == float("-inf"), 0.0, lse)  # its logits are also -inf
        total += tl.sum(tl.exp(logits - lse[:, None]), 0)
    asked_of = tl.maximum(tl.minimum(tl.load(positions_ptr + pair // K), W), 1)
    each = 1 if LARGEST else N // K
    competing = tl.load(competing_ptr + at_slot, mask=slot < S, other=0) != 0
    out = tl.where(competing, total / (asked_of * each).to(tl.float32), 0.0)
    tl.store(out_ptr + at_slot, out, mask=slot < S)
