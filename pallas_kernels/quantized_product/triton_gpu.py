"""Implements `api.quantized_product` with jax-triton for a few rows, without tensor cores.

A program has some rows of the matrix and all of their columns. Integers are widened to float32, and
what a thread has of a block is multiplied with the block's scale before anything is added across
threads. What one row is made of, a sum and its norm or a gate, each program computes anew, as
`row_product_triton` does.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks


class BlocksTiling(NamedTuple):
    """Describes how the work is cut.

    Attributes:
        out: rows of the matrix in a program.
        columns: of a tile, a multiple of 32.
        num_warps: warps per program.
        stages: tiles that are on the way.
    """

    out: int
    columns: int
    num_warps: int
    stages: int


def default_tiling(rows: int, width: int) -> BlocksTiling:
    """Chooses what was measured best on an H100, for the matrices of Llama 3.1 8B."""
    if rows > 1:
        return BlocksTiling(16, 512, 4, 3)
    return BlocksTiling(8 if width <= 8192 else 16, 1024, 4, 3)


def quantized_product(
    x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any, tiling: BlocksTiling | None = None
) -> Float[Array, "rows out"]:
    """Implements `api.quantized_product` with jax-triton."""
    return _product(x, matrix, None, jnp.dtype(dtype), len(x), tiling, gated=False)


def gated_product(
    gate_up: Float[Array, "*batch two_in"],
    matrix: Blocks,
    bias: Float[Array, "out"] | None = None,
    *,
    tiling: BlocksTiling | None = None,
) -> Float[Array, "*batch out"]:
    """Implements `gated_product` for one row."""
    return _product(gate_up, matrix, bias, gate_up.dtype, 1, tiling, gated=True)


def _product(
    x: Float[Array, "*batch numbers"],
    matrix: Blocks,
    bias: Float[Array, "out"] | None,
    dtype: Any,
    rows: int,
    tiling: BlocksTiling | None,
    *,
    gated: bool,
) -> Float[Array, "*batch out"]:
    from jsparse.pallas_kernels.triton_call import triton_call

    out = matrix["values"].shape[0]
    return triton_call(
        *(x, matrix["values"], matrix["scales"]),
        x if bias is None else bias,  # a stand-in, never read
        kernel=product_kernel,
        out_shape=jax.ShapeDtypeStruct((*x.shape[:-1], out), dtype),
        ROWS=rows,
        HAS_BIAS=bias is not None,
        GATED=gated,
        **_launch(matrix, rows, tiling),
    )


def norm_product(
    x: Float[Array, "*batch in"],
    delta: Float[Array, "*batch in"],
    scale: Float[Array, "in"],
    matrix: Blocks,
    bias: Float[Array, "out"] | None = None,
    *,
    eps: float,
    tiling: BlocksTiling | None = None,
) -> tuple[Float[Array, "*batch in"], Float[Array, "*batch out"]]:
    """Implements `norm_product` for one row."""
    from jsparse.pallas_kernels.triton_call import triton_call

    y = jax.ShapeDtypeStruct((*x.shape[:-1], matrix["values"].shape[0]), x.dtype)
    total, y = triton_call(
        *(x, delta, scale, matrix["values"], matrix["scales"]),
        x if bias is None else bias,  # a stand-in, never read
        kernel=norm_product_kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), y],
        HAS_BIAS=bias is not None,
        EPS=eps,
        **_launch(matrix, 1, tiling),
    )
    return total, y


def _launch(matrix: Blocks, rows: int, tiling: BlocksTiling | None) -> dict[str, object]:
    out, width = matrix["values"].shape
    cut = tiling or default_tiling(rows, width)
    return {
        "grid": (triton.cdiv(out, cut.out),),
        "num_warps": cut.num_warps,
        "num_stages": cut.stages,
        "N": out,
        "WIDTH": width,
        "OUT": cut.out,
        "COLUMNS": cut.columns,
        "BLOCKS": cut.columns // BLOCK,
        "STAGES": cut.stages,
    }


@triton.jit
def product_kernel(
    x_ptr,  # [ROWS, WIDTH], or gate and up, [2 · WIDTH], where GATED
    values_ptr,  # [N, WIDTH]
    scales_ptr,  # [WIDTH / 32, N]
    bias_ptr,  # [N], read where HAS_BIAS
    out_ptr,  # [ROWS, N]
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiplies OUT rows of the matrix with all rows of x."""
    column = tl.arange(0, COLUMNS)[None, :]
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((OUT, BLOCKS), tl.float32),)
    for first in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        values, scales = _tile(values_ptr, scales_ptr, first, N, WIDTH, OUT, COLUMNS, BLOCKS)
        inside = first + column < WIDTH
        more = ()
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * WIDTH + first + column, mask=inside, other=0)
            if GATED:
                up = tl.load(x_ptr + WIDTH + first + column, mask=inside, other=0)
                gate = x.to(tl.float32)
                x = (gate / (1 + tl.exp(-gate)) * up.to(tl.float32)).to(x.dtype)
            terms = tl.reshape(values * x.to(tl.float32), (OUT, BLOCKS, 32))
            more += (sums[row] + tl.sum(terms, 2) * scales,)
        sums = more
    for row in tl.static_range(ROWS):
        _store(out_ptr + row * N, tl.sum(sums[row], 1), bias_ptr, N, OUT, HAS_BIAS)


@triton.jit
def norm_product_kernel(
    x_ptr,  # [WIDTH]
    delta_ptr,  # [WIDTH]
    scale_ptr,  # [WIDTH]
    values_ptr,  # [N, WIDTH]
    scales_ptr,  # [WIDTH / 32, N]
    bias_ptr,  # [N], read where HAS_BIAS
    total_ptr,  # [WIDTH]
    out_ptr,  # [N]
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Adds and normalises the row, and multiplies OUT rows of the matrix with it.

    Sums are divided by the norm, as in `row_product_triton`.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((OUT, BLOCKS), tl.float32)
    squares = tl.zeros((1, COLUMNS), tl.float32)
    for first in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        values, scales = _tile(values_ptr, scales_ptr, first, N, WIDTH, OUT, COLUMNS, BLOCKS)
        at = first + column
        x = tl.load(x_ptr + at, mask=at < WIDTH, other=0)
        delta = tl.load(delta_ptr + at, mask=at < WIDTH, other=0)
        weights = tl.load(scale_ptr + at, mask=at < WIDTH, other=0)
        total = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + at, total, mask=at < WIDTH)
        wide = total.to(tl.float32)
        squares += wide * wide
        terms = tl.reshape(values * (wide * weights.to(tl.float32)), (OUT, BLOCKS, 32))
        sums += tl.sum(terms, 2) * scales
    rate = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / WIDTH + EPS)
    _store(out_ptr, tl.sum(sums, 1) * rate, bias_ptr, N, OUT, HAS_BIAS)


@triton.jit
def _store(out_ptr, y, bias_ptr, N: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Stores the program's numbers of a row, with a bias."""
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    y = y.to(out_ptr.dtype.element_ty)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0)
        y = (y.to(tl.float32) + bias.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + n, y, mask=n < N)


@triton.jit
def _tile(
    values_ptr,
    scales_ptr,
    first,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Loads columns from a first one on of the program's rows, and their blocks' scales."""
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    there = (n < N)[:, None]
    column = first + tl.arange(0, COLUMNS)[None, :]
    at = n.to(tl.int64)[:, None] * WIDTH + column
    values = tl.load(values_ptr + at, mask=there & (column < WIDTH), other=0).to(tl.float32)
    nth = first // 32 + tl.arange(0, BLOCKS)[None, :]
    inside = there & (nth * 32 < WIDTH)
    scales = tl.load(scales_ptr + nth * N + n[:, None], mask=inside, other=0)
    return values, scales.to(tl.float32)
