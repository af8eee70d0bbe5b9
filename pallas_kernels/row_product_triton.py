"""Multiplies one row by a matrix in jax-triton, without tensor cores.

A program has some columns of the matrix and all its rows, and loads a tile of rows at a time into
registers, large enough to keep the memory busy. Each program recomputes the row (a sum and its
norm, or a gate), tile by tile, which takes less time than another launch.
"""

from typing import NamedTuple

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float


class ProductTiling(NamedTuple):
    """Division of the work.

    Attributes:
        rows: rows of the matrix per tile.
        columns: columns per program.
        num_warps: warps per program.
        unroll: tiles between two branches.
    """

    rows: int
    columns: int
    num_warps: int
    unroll: int


def default_tiling(width: int, out: int) -> ProductTiling:
    """Returns the fastest tiling measured for matrices of about this size.

    It was measured on an H100, on the matrices of SmolLM2-135M, and of Llama 3.1 8B and 70B divided
    over four. Few columns take narrow programs, so that there are many, and tiles of all rows.
    """
    if width <= 1024 and out < 4096:
        return ProductTiling(1024, 16, 8, 1)
    if out < 2048:
        return ProductTiling(2048, 8, 16, 1) if width <= 2048 else ProductTiling(1024, 16, 16, 4)
    return ProductTiling(256, 32, 8, 3) if width <= 2048 else ProductTiling(512, 32, 8, 4)


def row_product(
    x: Float[Array, "*batch numbers"],
    matrix: Float[Array, "in out"],
    bias: Float[Array, "out"] | None = None,
    *,
    gated: bool = False,
    tiling: ProductTiling | None = None,
) -> Float[Array, "*batch out"]:
    """Implements `skinny_product`, and `gated_product` if x is gate | up."""
    from jsparse.pallas_kernels.triton_call import triton_call

    return triton_call(
        x,
        matrix,
        x if bias is None else bias,  # placeholder, never read
        kernel=product_kernel,
        out_shape=jax.ShapeDtypeStruct((*x.shape[:-1], matrix.shape[1]), x.dtype),
        HAS_BIAS=bias is not None,
        GATED=gated,
        **_launch(matrix, tiling),
    )


def norm_product(
    x: Float[Array, "*batch in"],
    delta: Float[Array, "*batch in"],
    scale: Float[Array, "in"],
    matrix: Float[Array, "in out"],
    bias: Float[Array, "out"] | None = None,
    *,
    eps: float,
    tiling: ProductTiling | None = None,
) -> tuple[Float[Array, "*batch in"], Float[Array, "*batch out"]]:
    """Implements `norm_product`."""
    from jsparse.pallas_kernels.triton_call import triton_call

    y = jax.ShapeDtypeStruct((*x.shape[:-1], matrix.shape[1]), x.dtype)
    total, y = triton_call(
        x,
        delta,
        scale,
        matrix,
        x if bias is None else bias,
        kernel=norm_product_kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), y],
        HAS_BIAS=bias is not None,
        EPS=eps,
        **_launch(matrix, tiling),
    )
    return total, y


def _launch(matrix: Float[Array, "in out"], tiling: ProductTiling | None) -> dict[str, object]:
    width, out = matrix.shape
    cut = tiling or default_tiling(width, out)
    return {
        "grid": (triton.cdiv(out, cut.columns),),
        "num_warps": cut.num_warps,
        "num_stages": 1,
        "WIDTH": width,
        "N": out,
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "UNROLL": cut.unroll,
    }


@triton.jit
def product_kernel(
    x_ptr,  # [WIDTH], or gate and up, [2 · WIDTH], if GATED
    matrix_ptr,  # [WIDTH, N]
    bias_ptr,  # [N], read where HAS_BIAS
    out_ptr,  # [N]
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiplies the row by COLUMNS columns of the matrix."""
    row = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, WIDTH, ROWS, num_stages=1, loop_unroll_factor=UNROLL):
        numbers = _tile(matrix_ptr, first, WIDTH, N, ROWS, COLUMNS)
        nth = first + row
        x = tl.load(x_ptr + nth, mask=nth < WIDTH, other=0)
        if GATED:
            up = tl.load(x_ptr + WIDTH + nth, mask=nth < WIDTH, other=0)
            gate = x.to(tl.float32)
            x = (gate / (1 + tl.exp(-gate)) * up.to(tl.float32)).to(x.dtype)
        sums += numbers.to(tl.float32) * x.to(tl.float32)[:, None]
    _store(sums, 1.0, bias_ptr, out_ptr, N, COLUMNS, HAS_BIAS)


@triton.jit
def norm_product_kernel(
    x_ptr,  # [WIDTH]
    delta_ptr,  # [WIDTH]
    scale_ptr,  # [WIDTH]
    matrix_ptr,  # [WIDTH, N]
    bias_ptr,  # [N], read where HAS_BIAS
    total_ptr,  # [WIDTH]
    out_ptr,  # [N]
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Adds and normalises the row, and multiplies it by COLUMNS columns of the matrix.

    The sums are divided by the norm instead of the row, so that products do not wait for the norm
    and the row is not rounded before them.
    """
    row = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, WIDTH, ROWS, num_stages=1, loop_unroll_factor=UNROLL):
        numbers = _tile(matrix_ptr, first, WIDTH, N, ROWS, COLUMNS)
        nth = first + row
        x = tl.load(x_ptr + nth, mask=nth < WIDTH, other=0)
        delta = tl.load(delta_ptr + nth, mask=nth < WIDTH, other=0)
        scale = tl.load(scale_ptr + nth, mask=nth < WIDTH, other=0)
        total = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + nth, total, mask=nth < WIDTH)
        wide = total.to(tl.float32)
        squares += wide * wide
        sums += numbers.to(tl.float32) * (wide * scale.to(tl.float32))[:, None]
    rate = tl.rsqrt(tl.sum(squares, 0) / WIDTH + EPS)
    _store(sums, rate, bias_ptr, out_ptr, N, COLUMNS, HAS_BIAS)


@triton.jit
def _tile(
    matrix_ptr,
    first,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Loads ROWS rows of the program's columns, from row `first` on."""
    nth = first + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = matrix_ptr + nth.to(tl.int64)[:, None] * N + column[None, :]
    if WIDTH % ROWS == 0 and N % COLUMNS == 0:
        numbers = tl.load(at)
    else:
        numbers = tl.load(at, mask=(nth < WIDTH)[:, None] & (column < N)[None, :], other=0)
    return numbers


@triton.jit
def _store(
    sums,
    rate,
    bias_ptr,
    out_ptr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Adds the rows' parts of each column, multiplies by `rate`, adds a bias, and stores it."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    y = (tl.sum(sums, 0) * rate).to(out_ptr.dtype.element_ty)
    if HAS_BIAS:
        wide = y.to(tl.float32) + tl.load(bias_ptr + column, mask=column < N, other=0).to(
            tl.float32
        )
        y = wide.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, y, mask=column < N)
