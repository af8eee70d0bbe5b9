"""Implements `api.rope_append` with jax-triton, in one launch with a program per head of a token.

Pages are written in place. A product of the rotation may be fused with its sum, so an element may
be an ulp off.
"""

from dataclasses import dataclass

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Int32

from jsparse.cache import LayerCache, write_beside
from jsparse.heads import Heads
from jsparse.shapes import ChunkKV, ChunkQueries, Rows


@dataclass(frozen=True)
class RopePlan:
    """Static parameters of one launch, with the letters of jsparse.shapes.

    Attributes:
        parts: parts of q, k and v to add.
        part: elements per part; 0 if there is only one part.
        tokens, heads, kv_heads, head_dim, page_size, pages: T, N, K, H, P and M.
        half: H / 2.
        columns: `half`, rounded up to a power of two.
        paged: whether the layer has a block table.
        normed: whether heads of q and k are normalised.
        eps: of their norms.
    """

    parts: int
    part: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    half: int
    columns: int
    paged: bool
    normed: bool
    eps: float


def rope_append(
    heads: Heads, layer: LayerCache, positions: Int32[Array, "B T"], valid: Rows
) -> tuple[ChunkQueries, ChunkKV, ChunkKV, LayerCache]:
    """Implements `api.rope_append` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, tokens, count, head_dim = heads.qkv.shape[-4:]
    table, kv_heads = layer.block_table, heads.num_kv_heads
    in_parts = heads.qkv.ndim > 4
    plan = RopePlan(
        parts=len(heads.qkv) if in_parts else 1,
        part=heads.qkv[0].size if in_parts else 0,
        tokens=tokens,
        heads=heads.num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=layer.page_size,
        pages=layer.num_pages,
        half=head_dim // 2,
        columns=triton.next_power_of_2(head_dim // 2),
        paged=table is not None,
        normed=heads.scales is not None,
        eps=heads.eps,
    )
    absent = layer.lengths  # placeholder for missing arrays; never read
    pools = layer.arrays if layer.bias is None else (*layer.arrays, layer.bias)
    given = (
        *(heads.qkv, *heads.table, *(heads.scales or (absent, absent))),
        *(layer.lengths, valid, absent if table is None else table),
    )

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, heads.dtype)

    q, k, v, *pools = triton_call(
        *given,
        *pools,
        kernel=rope_kernel if layer.bias is None else rope_bias_kernel,
        out_shape=[
            shape(batch, tokens, heads.num_heads, head_dim),
            shape(batch, tokens, kv_heads, head_dim),
            shape(batch, tokens, kv_heads, head_dim),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        ],
        input_output_aliases={len(given) + nth: 3 + nth for nth in range(len(pools))},
        grid=(count, batch * tokens),
        num_warps=1,
        plan=plan,
    )
    layer = layer._replace(k=pools[0], v=pools[1], bias=None)
    layer = write_beside(layer, positions, valid, layer.lengths - valid[:, None])
    return q, k, v, layer._replace(bias=pools[2] if len(pools) > 2 else None)


@triton.jit
def rope_kernel(
    qkv,  # [parts, B, T, N + 2K, H]
    cos,  # [B, T, H / 2]
    sin,  # [B, T, H / 2]
    q_scale,  # [H]
    k_scale,  # [H]
    lengths,  # [B, K]
    valid,  # [B]
    table,  # [B, K, M]
    _k,  # aliases of the returned pools
    _v,
    q_out,  # [B, T, N, H]
    k_out,  # [B, T, K, H]
    v_out,  # [B, T, K, H]
    k_pool,  # [pages, P, H]
    v_pool,  # [pages, P, H]
    plan: tl.constexpr,
):
    """Processes one head of a token."""
    inputs = (qkv, cos, sin, q_scale, k_scale, lengths, valid, table)
    rotate(inputs, (q_out, k_out, v_out, k_pool, v_pool, None), plan)


@triton.jit
def rope_bias_kernel(
    qkv,
    cos,
    sin,
    q_scale,
    k_scale,
    lengths,
    valid,
    table,
    _k,
    _v,
    _bias,
    q_out,
    k_out,
    v_out,
    k_pool,
    v_pool,
    bias_pool,  # [pages, P]
    plan: tl.constexpr,
):
    """Processes one head of a token in a cache with slot biases; new slots get 0."""
    inputs = (qkv, cos, sin, q_scale, k_scale, lengths, valid, table)
    rotate(inputs, (q_out, k_out, v_out, k_pool, v_pool, bias_pool), plan)


@triton.jit
def rotate(inputs, outputs, plan: tl.constexpr):
    """Rotates one head of a token, and stores the result."""
    qkv, cos, sin, q_scale, k_scale, lengths, valid, table = inputs
    q_out, k_out, v_out, k_pool, v_pool, bias_pool = outputs
    head, token = tl.program_id(0), tl.program_id(1)
    row, nth = token // plan.tokens, token % plan.tokens
    parts: tl.constexpr = plan.parts
    count: tl.constexpr = plan.heads + 2 * plan.kv_heads
    column = tl.arange(0, plan.columns)
    inside = column < plan.half
    start = qkv + (token * count + head) * plan.head_dim + column
    dtype = q_out.dtype.element_ty
    low = tl.load(start, mask=inside, other=0).to(tl.float32)
    high = tl.load(start + plan.half, mask=inside, other=0).to(tl.float32)
    for _ in tl.static_range(1, parts):
        start += plan.part
        low += tl.load(start, mask=inside, other=0)
        high += tl.load(start + plan.half, mask=inside, other=0)
    low, high = low.to(dtype), high.to(dtype)
    of_value = head >= plan.heads + plan.kv_heads
    if not of_value:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if plan.normed:
            scale = q_scale
            if head >= plan.heads:
                scale = k_scale
            rate = tl.rsqrt(tl.sum(x * x + y * y, 0) / plan.head_dim + plan.eps)
            of_low = tl.load(scale + column, mask=inside, other=0).to(tl.float32)
            of_high = tl.load(scale + plan.half + column, mask=inside, other=0).to(tl.float32)
            x = ((x * rate).to(dtype).to(tl.float32) * of_low).to(dtype).to(tl.float32)
            y = ((y * rate).to(dtype).to(tl.float32) * of_high).to(dtype).to(tl.float32)
        c = tl.load(cos + token * plan.half + column, mask=inside, other=0)
        s = tl.load(sin + token * plan.half + column, mask=inside, other=0)
        low, high = (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)
    if head < plan.heads:
        put(q_out, token * plan.heads + head, low, high, column, inside, plan)
    else:
        low, high = finite(low), finite(high)
        kv_head = head - plan.heads
        if of_value:
            kv_head -= plan.kv_heads
        pair = row * plan.kv_heads + kv_head
        new = tl.load(valid + row)
        slot = tl.load(lengths + pair) - new + nth
        ok = (nth < new) & (slot >= 0) & (slot < plan.pages * plan.page_size)
        page = tl.where(ok, slot // plan.page_size, 0) + pair * plan.pages
        if plan.paged:
            page = tl.load(table + page)
        at = page.to(tl.int64) * plan.page_size + slot % plan.page_size
        if of_value:
            put(v_out, token * plan.kv_heads + kv_head, low, high, column, inside, plan)
            put(v_pool, at, low, high, column, inside & ok, plan)
        else:
            put(k_out, token * plan.kv_heads + kv_head, low, high, column, inside, plan)
            put(k_pool, at, low, high, column, inside & ok, plan)
            if bias_pool is not None:
                tl.store(bias_pool + at, 0.0, mask=ok)


@triton.jit
def finite(x):
    """Returns x with NaN and infinities replaced by 0."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def put(rows, at, low, high, column, inside, plan: tl.constexpr):
    """Stores both halves of a row."""
    start = rows + at * plan.head_dim + column
    tl.store(start, low.to(rows.dtype.element_ty), mask=inside)
    tl.store(start + plan.half, high.to(rows.dtype.element_ty), mask=inside)
