"""Implements `api.residual_norm` with jax-triton, in one launch with a program per row."""

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float

NUMBERS_A_THREAD = 4


def residual_norm(
    x: Float[Array, "rows D"],
    delta: Float[Array, "rows D"] | Float[Array, "parts rows D"],
    scale: Float[Array, "D"],
    *,
    eps: float,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Implements `api.residual_norm` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    rows, width = x.shape
    columns, in_parts = triton.next_power_of_2(width), delta.ndim > x.ndim
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = triton_call(
        *(x, delta, scale),
        kernel=norm_kernel,
        out_shape=[shape, shape],
        grid=(rows,),
        num_warps=min(max(columns // (32 * NUMBERS_A_THREAD), 1), 32),
        PARTS=len(delta) if in_parts else 1,
        PART=x.size if in_parts else 0,
        W=width,
        COLUMNS=columns,
        EPS=eps,
    )
    return total, normed


@triton.jit
def norm_kernel(
    x_ptr,  # [rows, W]
    delta_ptr,  # [PARTS, rows, W]
    scale_ptr,  # [W]
    total_ptr,  # [rows, W]
    normed_ptr,  # [rows, W]
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Adds and normalises a row."""
    column = tl.arange(0, COLUMNS)
    inside = column < W
    at = tl.program_id(0).to(tl.int64) * W + column
    x = tl.load(x_ptr + at, mask=inside, other=0)
    delta = tl.load(delta_ptr + at, mask=inside, other=0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        delta += tl.load(delta_ptr + part * PART + at, mask=inside, other=0).to(tl.float32)
    total = (x.to(tl.float32) + delta.to(x.dtype).to(tl.float32)).to(x.dtype)
    scale = tl.load(scale_ptr + column, mask=inside, other=0)
    tl.store(total_ptr + at, total, mask=inside)
    wide = total.to(tl.float32)
    rate = tl.rsqrt(tl.sum(wide * wide, 0) / W + EPS)
    normed = (wide * rate).to(x.dtype).to(tl.float32) * scale.to(tl.float32)
    tl.store(normed_ptr + at, normed.to(x.dtype), mask=inside)
