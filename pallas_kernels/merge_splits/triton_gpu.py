"""Implements `api.merge_splits` with jax-triton, one program per pair and row.

A program merges all splits at once: 66 of them take 3.2 us, and 132 taken 32 at a time took 13.3 in
a trial (bench/README.md).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

FEW = 16  # splits that one warp merges in 3.2 us; four warps took 8.3 (bench/README.md)


@triton.jit
def _sum(
    o_ptr,  # [pairs, splits, R, H]
    lse_ptr,  # [pairs, splits, R]
    first,
    used,
    R: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Merges a row of the first `used` ≤ SPLITS splits; `first` is that row of the first split."""
    split, channel = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    counts = split < used
    at = first + split * R
    lse = tl.load(lse_ptr + at, mask=counts, other=float("-inf"))
    parts = tl.load(
        o_ptr + at[:, None] * H + channel, mask=counts[:, None] & (channel < H), other=0.0
    )
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weights = tl.exp(lse - top)
    total = tl.sum(weights, 0)
    return tl.sum(weights[:, None] * parts, 0) / tl.where(total == 0.0, 1.0, total), tl.log(
        total
    ) + top


@triton.jit
def _merge(
    o_ptr,  # [pairs, splits, R, H]
    lse_ptr,  # [pairs, splits, R]
    used_ptr,  # [≥ pairs]
    merged_ptr,  # [pairs, rows - lse_only, H]
    merged_lse_ptr,  # [pairs, rows]
    splits: tl.constexpr,
    R: tl.constexpr,
    H: tl.constexpr,
    rows: tl.constexpr,
    lse_only: tl.constexpr,
    SPLITS: tl.constexpr,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pair, row = tl.program_id(0), tl.program_id(1)
    used = tl.load(used_ptr + pair)
    first = pair.to(tl.int64) * splits * R + row
    if used <= FEW:
        merged, lse = _sum(o_ptr, lse_ptr, first, used, R, H, FEW, WIDTH)
    else:
        merged, lse = _sum(o_ptr, lse_ptr, first, used, R, H, SPLITS, WIDTH)
    channel = tl.arange(0, WIDTH)
    out = pair.to(tl.int64) * (rows - lse_only) + row - lse_only
    tl.store(merged_ptr + out * H + channel, merged, mask=(channel < H) & (row >= lse_only))
    tl.store(merged_lse_ptr + pair * rows + row, lse)


def merge_splits(
    o: Float32[Array, "pairs splits R H"],
    lse: Float32[Array, "pairs splits R"],
    used: Int32[Array, "at_least_pairs"],
    rows: int,
    *,
    lse_only: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "pairs {rows-lse_only} H"], Float32[Array, "pairs {rows}"]]:
    """Implements `api.merge_splits` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    pairs, splits, padded, head_dim = o.shape
    all_splits = triton.next_power_of_2(splits)
    out = [
        jax.ShapeDtypeStruct((pairs, rows - lse_only, head_dim), dtype),
        jax.ShapeDtypeStruct((pairs, rows), jnp.float32),
    ]
    return triton_call(
        o,
        lse,
        used,
        kernel=_merge,
        out_shape=out,
        grid=(pairs, rows),
        num_warps=1
        if all_splits <= FEW
        else max(4, all_splits // 32),  # with fewer warps, a thread's registers overflow
        splits=splits,
        R=padded,
        H=head_dim,
        rows=rows,
        lse_only=lse_only,
        FEW=min(FEW, all_splits),
        SPLITS=all_splits,
        WIDTH=triton.next_power_of_2(head_dim),
    )
