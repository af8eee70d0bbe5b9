"""Computes `key_constants.span_terms` with jax-triton, for score kernels.

The tiling of XLA's product depends on the batch, and with it the bits of a row. Here the queries of
all rows are side by side in a tile, so that the angles are read once for many, and a term comes
from one row and one column of one tile. Each float32 factor is multiplied as three TF32 products,
which lose almost nothing: terms reach 10,000, while logits that differ by 1 must be distinguished.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32

from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.mean_query_triton import load_queries

SPANS, QUERIES = 16, 32  # per program: small, since a single row has few queries


def span_terms(
    q: Float[Array, "B N H"], frame: KeyFrame, cols: int, mean: int = 1
) -> Float32[Array, "B K spans cols"]:
    """Computes the terms, with the query heads of a group side by side.

    `mean` consecutive query heads count as one, their mean. Columns past a group's number of these
    are undefined.
    """
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads, head_dim), (spans, _) = q.shape, frame.angles.shape
    kv_heads, rows = frame.mid.shape[0], batch * heads // mean
    return triton_call(
        q,
        frame.mid,
        frame.angles,
        kernel=terms_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, spans, cols), jnp.float32),
        grid=(triton.cdiv(spans, SPANS), triton.cdiv(rows, QUERIES)),
        num_warps=4,
        num_stages=1,
        S=spans,
        K=kv_heads,
        G=heads // mean // kv_heads,
        MEAN=mean,
        ROWS=rows,
        HALF=head_dim // 2,
        PAIRS=max(16, triton.next_power_of_2(head_dim // 2)),
        TO=cols,
        BLOCK=SPANS,
        COLS=QUERIES,
    )


@triton.jit
def terms_kernel(
    q_ptr,  # [B, N, 2 · HALF]
    mid_ptr,  # [K, 2 · HALF]
    angles_ptr,  # [spans, 2 · HALF]
    out_ptr,  # [B, K, spans, TO]
    S: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
):
    """Computes the terms of BLOCK spans for COLS of the queries of all rows."""
    span = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    query = tl.program_id(1) * COLS + tl.arange(0, COLS)
    pair = tl.arange(0, PAIRS)
    inside = (pair < HALF)[:, None] & (query < ROWS)[None, :]
    q_at = q_ptr + query[None, :] * (MEAN * 2 * HALF) + pair[:, None]
    q_low = load_queries(q_at, inside, 2 * HALF, MEAN).to(tl.float32)
    q_high = load_queries(q_at + HALF, inside, 2 * HALF, MEAN).to(tl.float32)
    mid_at = (query // G % K)[None, :] * (2 * HALF) + pair[:, None]
    low = tl.load(mid_ptr + mid_at, mask=inside, other=0.0)
    high = tl.load(mid_ptr + mid_at + HALF, mask=inside, other=0.0)
    angle_at = span[:, None] * (2 * HALF) + pair[None, :]
    known = (span < S)[:, None] & (pair < HALF)[None, :]
    cos = tl.load(angles_ptr + angle_at, mask=known, other=0.0)
    sin = tl.load(angles_ptr + angle_at + HALF, mask=known, other=0.0)
    terms = tl.dot(cos, q_low * low + q_high * high, input_precision="tf32x3")
    terms = tl.dot(sin, q_high * low - q_low * high, terms, input_precision="tf32x3")
    to = ((query // G)[None, :].to(tl.int64) * S + span[:, None]) * TO + (query % G)[None, :]
    tl.store(out_ptr + to, terms, mask=(span < S)[:, None] & (query < ROWS)[None, :])
