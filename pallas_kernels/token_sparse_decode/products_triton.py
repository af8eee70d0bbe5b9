"""Multiplies queries by listed rows of K with jax-triton, without copying these rows.

Attention to the best of them then reads only V (`Selection.logits`). To select and attend in one
launch, a program would need all rows of a head: the keys of 900 tokens, at 128 channels of 16 bits,
fill the shared memory of an SM of an H100.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32, Num

BLOCK = 64  # rows per program
NUM_WARPS = 4


def products(
    q: Float[Array, "B K G H"],
    rows: Num[Array, "rows H"],
    at: Int32[Array, "B K n"],
    scales: Float[Array, "rows"] | None = None,
    reach: Float32[Array, "K H"] | None = None,
) -> Float32[Array, "B K G n"]:
    """Multiplies each query by the rows of its KV head, all in one array.

    Rows in 8 bits have scales, and their channels may have a reach.
    """
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads, group, width), number = q.shape, at.shape[2]
    (logits,) = triton_call(
        q,
        rows,
        at,
        at if scales is None else scales,  # placeholders are not read
        at if reach is None else reach,
        kernel=listed_products_kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, heads, group, number), jnp.float32)],
        grid=(batch * heads * triton.cdiv(number, BLOCK),),
        num_warps=NUM_WARPS,
        NUMBER=number,
        G=group,
        H=width,
        ROWS=16,  # the minimum of an MMA
        INT8=scales is not None,
        HAS_REACH=reach is not None,
        K=heads,
        COLS=max(16, triton.next_power_of_2(width)),
        BLOCK=BLOCK,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
    )
    return logits


@triton.jit
def listed_products_kernel(
    q_ptr,  # [pairs, G, H]
    rows_ptr,  # [rows, H]
    at_ptr,  # [pairs, NUMBER]
    scales_ptr,  # [rows], if rows are in 8 bits
    reach_ptr,  # [K, H]
    logits_ptr,  # [pairs, G, NUMBER]
    NUMBER: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    INT8: tl.constexpr,
    HAS_REACH: tl.constexpr,
    K: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiplies the queries of one head by one block of its rows."""
    blocks: tl.constexpr = (NUMBER + BLOCK - 1) // BLOCK
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    nth = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(at_ptr + pair * NUMBER + nth, mask=nth < NUMBER, other=0).to(tl.int64)
    inside = (nth < NUMBER)[:, None] & (col < H)
    k = tl.load(rows_ptr + at[:, None] * H + col, mask=inside, other=0)
    own = (row < G) & (col < H)
    q = tl.load(q_ptr + (pair * G + row) * H + col, mask=own, other=0.0)
    if INT8:
        scales = tl.load(scales_ptr + at, mask=nth < NUMBER, other=0).to(tl.float32)
        k = k.to(tl.float32) * scales[:, None]
        if HAS_REACH:
            k *= tl.load(reach_ptr + pair % K * H + col, mask=col < H, other=0.0)
        k = k.to(q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    lines = logits_ptr + (pair * G + row) * NUMBER + nth[None, :]
    tl.store(lines, logits, mask=(row < G) & (nth < NUMBER)[None, :])
