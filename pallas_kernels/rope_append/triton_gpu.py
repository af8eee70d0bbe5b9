"""Implements `api.rope_append` with jax-triton, in one launch with a program per head of a token.

Pages are written in place. A product of the rotation may be fused with its sum, so an element may
be an ulp off.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int32

from jsparse.cache import LayerCache, arrays_of, with_arrays, write_beside
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
        int8, has_reach: whether K and V are integers with scales, and channels of K have a reach.
        has_bias: whether slots have a bias.
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
    int8: bool
    has_reach: bool
    has_bias: bool
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
    (k, k_scales, reach), (v, v_scales, _) = arrays_of(layer.k), arrays_of(layer.v)
    pools = k, v, k_scales, v_scales, layer.bias
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
        int8=k_scales is not None,
        has_reach=reach is not None,
        has_bias=layer.bias is not None,
        normed=heads.scales is not None,
        eps=heads.eps,
    )
    absent = layer.lengths  # placeholder for missing arrays; never read
    given = (
        *(heads.qkv, *heads.table, *(heads.scales or (absent, absent))),
        *(layer.lengths, valid, absent if table is None else table),
        absent if reach is None else reach,
    )

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, heads.dtype)

    there = [nth for nth, pool in enumerate(pools) if pool is not None]
    nothing = jax.ShapeDtypeStruct((1,), jnp.int32)
    q, k, v, *kept = triton_call(
        *given,
        *(absent if pool is None else pool for pool in pools),
        kernel=rope_kernel,
        out_shape=[
            shape(batch, tokens, heads.num_heads, head_dim),
            shape(batch, tokens, kv_heads, head_dim),
            shape(batch, tokens, kv_heads, head_dim),
            *(
                nothing if pool is None else jax.ShapeDtypeStruct(pool.shape, pool.dtype)
                for pool in pools
            ),
        ],
        input_output_aliases={len(given) + nth: 3 + nth for nth in there},
        grid=(count, batch * tokens),
        num_warps=1,
        plan=plan,
    )
    k_pool, v_pool, k_scales, v_scales, bias = kept
    beside = layer._replace(bias=None)
    beside = write_beside(beside, positions, valid, layer.lengths - valid[:, None])
    layer = beside._replace(
        k=with_arrays(layer.k, k_pool, k_scales),
        v=with_arrays(layer.v, v_pool, v_scales),
        bias=None if layer.bias is None else bias,
    )
    return q, k, v, layer


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
    reach,  # [K, H]
    _k,  # aliases of the returned pools
    _v,
    _k_scales,
    _v_scales,
    _bias,
    q_out,  # [B, T, N, H]
    k_out,  # [B, T, K, H]
    v_out,  # [B, T, K, H]
    k_pool,  # [pages, P, H]
    v_pool,  # [pages, P, H]
    k_scales,  # [pages, P], if pools are in 8 bits
    v_scales,  # [pages, P]
    bias_pool,  # [pages, P], of a cache with slot biases; new slots get 0
    plan: tl.constexpr,
):
    """Processes one head of a token."""
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
        row = token * plan.kv_heads + kv_head
        if of_value:
            low, high = store(v_pool, v_scales, None, at, low, high, column, inside, ok, plan)
            put(v_out, row, low, high, column, inside, plan)
        else:
            of_head = reach + kv_head * plan.head_dim if plan.has_reach else None
            low, high = store(k_pool, k_scales, of_head, at, low, high, column, inside, ok, plan)
            put(k_out, row, low, high, column, inside, plan)
            if plan.has_bias:
                tl.store(bias_pool + at, 0.0, mask=ok)


@triton.jit
def store(pool, scales, reach, at, low, high, column, inside, ok, plan: tl.constexpr):
    """Stores a row where `ok`, and returns its halves as they are read from then on."""
    if plan.int8:
        of_low, of_high = 1.0, 1.0
        if reach is not None:
            of_low = tl.load(reach + column, mask=inside, other=1.0)
            of_high = tl.load(reach + plan.half + column, mask=inside, other=1.0)
        x, y = tl.div_rn(low.to(tl.float32), of_low), tl.div_rn(high.to(tl.float32), of_high)
        largest = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 0)
        scale = tl.div_rn(largest, 127.0).to(tl.bfloat16)
        tl.store(scales + at, scale, mask=ok)
        step = scale.to(tl.float32)
        step = tl.where(step == 0, 1.0, step)
        x, y = nearest(tl.div_rn(x, step)), nearest(tl.div_rn(y, step))
        put(pool, at, x, y, column, inside & ok, plan)
        factor = scale.to(tl.float32)
        low, high = (x * factor * of_low).to(low.dtype), (y * factor * of_high).to(high.dtype)
    else:
        put(pool, at, low, high, column, inside & ok, plan)
        kept = pool.dtype.element_ty
        low, high = low.to(kept).to(low.dtype), high.to(kept).to(high.dtype)
    return low, high


@triton.jit
def nearest(x):
    """Returns the nearest integer of at most 127, and the even one of two."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return (x + 12582912.0) - 12582912.0  # at 1.5 · 2^23, float32 holds only integers


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
