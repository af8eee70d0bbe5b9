"""Implements `api.new_token_attention` with jax-triton, one program per row and KV head.

A program holds the new K and V of its head, and takes the head's queries ROWS at a time.
"""

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32

ROWS = 64  # most queries at a time
LEAST = 16  # rows and columns of a product


def new_token_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    past_o: Float32[Array, "B K rows H"],
    past_lse: Float32[Array, "B K rows"],
) -> Float[Array, "B T N H"]:
    """Implements `api.new_token_attention` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, tokens, heads, head_dim = q.shape
    kv_heads, queries = past_o.shape[1:3]
    rows = min(max(triton.next_power_of_2(queries), LEAST), ROWS)
    return triton_call(
        *(q, k, v, past_o, past_lse),
        kernel=attend_kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch * kv_heads, triton.cdiv(queries, rows)),
        num_warps=4,
        HEADS=heads,
        KV_HEADS=kv_heads,
        TOKENS=tokens,
        H=head_dim,
        ROWS=rows,
        COLUMNS=max(triton.next_power_of_2(tokens), LEAST),
        WIDTH=max(triton.next_power_of_2(head_dim), LEAST),
        SCALE=head_dim**-0.5,
        PRECISION="ieee" if q.dtype == "float32" else "tf32",
    )


@triton.jit
def attend_kernel(
    q_ptr,  # [B, TOKENS, HEADS, H]
    k_ptr,  # [B, TOKENS, KV_HEADS, H]
    v_ptr,  # [B, TOKENS, KV_HEADS, H]
    past_o_ptr,  # [B, KV_HEADS, TOKENS · G, H]
    past_lse_ptr,  # [B, KV_HEADS, TOKENS · G]
    o_ptr,  # [B, TOKENS, HEADS, H]
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends from up to ROWS queries of a KV head."""
    group: tl.constexpr = HEADS // KV_HEADS
    pair = tl.program_id(0)
    batch, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token, new, channel = row // group, tl.arange(0, COLUMNS), tl.arange(0, WIDTH)[None, :]
    inside = (token < TOKENS)[:, None] & (channel < H)
    query = (batch * TOKENS + token) * HEADS + head * group + row % group
    q = tl.load(q_ptr + query[:, None] * H + channel, mask=inside, other=0.0)
    of_new = ((batch * TOKENS + new) * KV_HEADS + head)[:, None] * H + channel
    there = (new < TOKENS)[:, None] & (channel < H)
    k = tl.load(k_ptr + of_new, mask=there, other=0.0)
    v = tl.load(v_ptr + of_new, mask=there, other=0.0)
    past = pair.to(tl.int64) * TOKENS * group + row
    past_lse = tl.load(past_lse_ptr + past, mask=token < TOKENS, other=float("-inf"))
    past_o = tl.load(past_o_ptr + past[:, None] * H + channel, mask=inside, other=0.0)
    logits = SCALE * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    causal = (new[None, :] <= token[:, None]) & (new[None, :] < TOKENS)
    logits = tl.where(causal, logits, float("-inf"))
    top = tl.maximum(tl.max(logits, 1), past_lse)  # finite: a token attends to itself
    weights, of_past = tl.exp(logits - top[:, None]), tl.exp(past_lse - top)
    total = tl.sum(weights, 1) + of_past
    o = tl.dot(weights.to(v.dtype), v, of_past[:, None] * past_o, input_precision=PRECISION)
    o = (o / total[:, None]).to(q.dtype)
    tl.store(o_ptr + query[:, None] * H + channel, o, mask=inside)
