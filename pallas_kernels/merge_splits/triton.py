# pyright: reportAttributeAccessIssue=false
"""jax-triton: a program a pair and row, some splits at once."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float32, Int32

FEW, MANY = 16, 32  # splits at once: of heads that have no more, and of others; more would take too many registers


@triton.jit
def _sum(o_ptr, lse_ptr, first, used, R: tl.constexpr, H: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr):
    """One row of the first `used` splits, so many at once; `first` is that row of the first split."""
    channel = tl.arange(0, WIDTH)
    merged, total, top = tl.zeros([WIDTH], tl.float32), 0.0, float("-inf")
    for start in range(0, used, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        counts = split < used
        at = first + split * R
        lse = tl.load(lse_ptr + at, mask=counts, other=float("-inf"))
        parts = tl.load(o_ptr + at[:, None] * H + channel, mask=counts[:, None] & (channel < H), other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, decay = tl.exp(lse - finite), tl.exp(top - finite)
        merged = merged * decay + tl.sum(weights[:, None] * parts, 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    return merged / tl.where(total == 0.0, 1.0, total), tl.log(total) + tl.where(total == 0.0, 0.0, top)


@triton.jit
def _merge(
    o_ptr,  # [pairs, splits, R, H]
    lse_ptr,  # [pairs, splits, R]
    used_ptr,  # [≥ pairs]
    merged_ptr,  # [pairs, rows, H]
    merged_lse_ptr,  # [pairs, rows]
    splits: tl.constexpr,
    R: tl.constexpr,
    H: tl.constexpr,
    rows: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pair, row = tl.program_id(0), tl.program_id(1)
    used = tl.load(used_ptr + pair)
    first = pair.to(tl.int64) * splits * R + row
    if used <= FEW:
        merged, lse = _sum(o_ptr, lse_ptr, first, used, R, H, FEW, WIDTH)
    else:
        merged, lse = _sum(o_ptr, lse_ptr, first, used, R, H, MANY, WIDTH)
    channel = tl.arange(0, WIDTH)
    out = pair * rows + row
    tl.store(merged_ptr + out.to(tl.int64) * H + channel, merged, mask=channel < H)
    tl.store(merged_lse_ptr + out, lse)


def merge_splits(
    o: Float32[Array, "pairs splits R H"],
    lse: Float32[Array, "pairs splits R"],
    used: Int32[Array, "at_least_pairs"],
    rows: int,
) -> tuple[Float32[Array, "pairs {rows} H"], Float32[Array, "pairs {rows}"]]:
    """See api."""
    from jsparse.pallas_kernels.triton_call import triton_call

    pairs, splits, padded, head_dim = o.shape
    out = [
        jax.ShapeDtypeStruct((pairs, rows, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((pairs, rows), jnp.float32),
    ]
    return triton_call(
        o,
        lse,
        used,
        kernel=_merge,
        out_shape=out,
        grid=(pairs, rows),
        num_warps=4,
        splits=splits,
        R=padded,
        H=head_dim,
        rows=rows,
        FEW=FEW,
        MANY=MANY,
        WIDTH=triton.next_power_of_2(head_dim),
    )
