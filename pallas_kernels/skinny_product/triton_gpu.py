"""Implements `api.skinny_product` with jax-triton for one row, without tensor cores.

A program has some columns of the matrix and all of its rows, of which it loads a tile at a time
into registers, enough at once to keep the memory busy.
"""

from typing import NamedTuple

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float


class ProductTiling(NamedTuple):
    """Describes how the work is cut.

    Attributes:
        rows: of the matrix in a tile.
        columns: of a program.
        num_warps: warps per program.
        unroll: tiles between two branches.
    """

    rows: int
    columns: int
    num_warps: int
    unroll: int


def default_tiling(width: int, out: int) -> ProductTiling:
    """Chooses what was measured best for matrices of about this size.

    Measured on an H100, on the matrices of SmolLM2-135M, and of Llama 3.1 8B and 70B shared out
    over four. Few columns take narrow programs, for there to be many, and large tiles.
    """
    if out < 2048:
        return ProductTiling(1024, 8, 8, 1) if width <= 2048 else ProductTiling(1024, 16, 16, 4)
    return ProductTiling(256, 32, 8, 3) if width <= 2048 else ProductTiling(512, 32, 8, 4)


def skinny_product(
    x: Float[Array, "*batch in"],
    matrix: Float[Array, "in out"],
    bias: Float[Array, "out"] | None = None,
    *,
    tiling: ProductTiling | None = None,
) -> Float[Array, "*batch out"]:
    """Implements `api.skinny_product` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    width, out = matrix.shape
    cut = tiling or default_tiling(width, out)
    return triton_call(
        x,
        matrix,
        x if bias is None else bias,  # a stand-in, never read
        kernel=product_kernel,
        out_shape=jax.ShapeDtypeStruct((*x.shape[:-1], out), x.dtype),
        grid=(triton.cdiv(out, cut.columns),),
        num_warps=cut.num_warps,
        num_stages=1,
        WIDTH=width,
        N=out,
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        UNROLL=cut.unroll,
        HAS_BIAS=bias is not None,
    )


@triton.jit
def product_kernel(
    x_ptr,  # [WIDTH]
    matrix_ptr,  # [WIDTH, N]
    bias_ptr,  # [N], read where HAS_BIAS
    out_ptr,  # [N]
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiplies the row with COLUMNS columns of the matrix."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < N
    row = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, WIDTH, ROWS, num_stages=1, loop_unroll_factor=UNROLL):
        nth = first + row
        at = matrix_ptr + nth.to(tl.int64)[:, None] * N + column[None, :]
        if WIDTH % ROWS == 0 and N % COLUMNS == 0:
            numbers = tl.load(at)
        else:
            numbers = tl.load(at, mask=(nth < WIDTH)[:, None] & there[None, :], other=0)
        x = tl.load(x_ptr + nth, mask=nth < WIDTH, other=0)
        sums += numbers.to(tl.float32) * x.to(tl.float32)[:, None]
    y = tl.sum(sums, 0).to(out_ptr.dtype.element_ty)
    if HAS_BIAS:
        wide = y.to(tl.float32) + tl.load(bias_ptr + column, mask=there, other=0).to(tl.float32)
        y = wide.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, y, mask=there)
