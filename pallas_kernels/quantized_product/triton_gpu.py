"""Implements `api.quantized_product` with jax-triton for a few rows, without tensor cores.

Widening a byte takes the same number of instructions as multiplying it, so x is converted to fixed
point instead, block by block. Numbers have 16 bits, or 24 if x is float32, and the largest of a
block of 32 uses all of them. An instruction multiplies four bytes of the matrix by four bytes of x,
and accumulates. The integers of a block are added without rounding, and multiplied by the block's
scale before sums across blocks.

A program has all columns, or a part of them that is added up afterwards, and several rows of the
matrix at a time; the next rows are in flight while it multiplies. It computes x itself (a sum and
its norm, or a gate) while its first rows are in flight.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks
from jsparse.parts import total

WHOLE = 4096  # maximum columns for which one program has them all
PART = 2048  # maximum columns per program otherwise


class BlocksTiling(NamedTuple):
    """Division of the work.

    Attributes:
        out: rows of the matrix that a program has at a time.
        columns: maximum columns per program, a power of two.
        num_warps: warps per program.
        programs: programs per SM.
    """

    out: int
    columns: int
    num_warps: int
    programs: int


def default_tiling(width: int, *, whole: bool) -> BlocksTiling:
    """Returns the fastest tiling measured on an H200, for the matrices of Llama 3.1 8B.

    `whole` requests programs that have all columns.
    """
    columns = triton.next_power_of_2(width if whole or width <= WHOLE else PART)
    return BlocksTiling(min(8, 2**15 // columns), columns, 8, 2 if columns > PART else 4)


def quantized_product(
    x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any, tiling: BlocksTiling | None = None
) -> Float[Array, "rows out"]:
    """Implements `api.quantized_product` with jax-triton."""
    return _product(x, matrix, None, jnp.dtype(dtype), tiling, gated=False)


def gated_product(
    gate_up: Float[Array, "*batch two_in"],
    matrix: Blocks,
    bias: Float[Array, "out"] | None = None,
    *,
    tiling: BlocksTiling | None = None,
) -> Float[Array, "*batch out"]:
    """Implements `gated_product` for one row."""
    return _product(gate_up, matrix, bias, gate_up.dtype, tiling, gated=True)


def _product(
    x: Float[Array, "*batch numbers"],
    matrix: Blocks,
    bias: Float[Array, "out"] | None,
    dtype: Any,
    tiling: BlocksTiling | None,
    *,
    gated: bool,
) -> Float[Array, "*batch out"]:
    from jsparse.pallas_kernels.triton_call import triton_call

    out, width = matrix["values"].shape
    tiling = tiling or default_tiling(width, whole=False)
    parts = triton.cdiv(width, tiling.columns)
    y = triton_call(
        *(x, matrix["values"], matrix["scales"]),
        kernel=product_kernel,
        out_shape=jax.ShapeDtypeStruct(
            (parts, *x.shape[:-1], out), dtype if parts == 1 else jnp.float32
        ),
        ROWS=x.size // x.shape[-1],
        CHUNK=triton.cdiv(width, parts * BLOCK) * BLOCK,
        GATED=gated,
        **_launch(x, matrix, tiling, parts),
    )
    y = total(y, x.ndim, dtype)
    return y if bias is None else y + bias


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

    out, width = matrix["values"].shape
    tiling = tiling or default_tiling(width, whole=True)
    assert width <= tiling.columns
    whole, y = triton_call(
        *(x, delta, scale, matrix["values"], matrix["scales"]),
        x if bias is None else bias,  # placeholder, never read
        kernel=norm_product_kernel,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((*x.shape[:-1], out), x.dtype),
        ],
        HAS_BIAS=bias is not None,
        EPS=eps,
        **_launch(x, matrix, tiling, 1),
    )
    return whole, y


def _launch(x: Array, matrix: Blocks, tiling: BlocksTiling, parts: int) -> dict[str, object]:
    out, width = matrix["values"].shape
    everywhere = tiling.programs * jax.local_devices()[0].core_count
    groups = max(min(everywhere // parts, triton.cdiv(out, tiling.out)), 1)
    return {
        "grid": (parts * groups,),
        "num_warps": tiling.num_warps,
        "N": out,
        "WIDTH": width,
        "OUT": tiling.out,
        "COLUMNS": tiling.columns,
        "GROUPS": groups,
        "BITS": 16 if x.dtype.itemsize == 2 else 24,
    }


@triton.jit
def product_kernel(
    x_ptr,  # [ROWS, WIDTH], or gate and up, [ROWS, 2 · WIDTH], if GATED
    values_ptr,  # [N, WIDTH]
    scales_ptr,  # [WIDTH / 32, N]
    out_ptr,  # [parts, ROWS, N]
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiplies CHUNK columns of every GROUPSth OUT rows of the matrix by those of x."""
    part, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    begin, end = part * CHUNK, tl.minimum(part * CHUNK + CHUNK, WIDTH)
    words, scales = tile(values_ptr, scales_ptr, group, begin, end, N, WIDTH, OUT, COLUMNS)
    column = begin + tl.arange(0, COLUMNS)
    rows, rates = (), ()
    for row in tl.static_range(ROWS):
        at = x_ptr + row * (2 * WIDTH if GATED else WIDTH) + column
        x = tl.load(at, mask=column < end, other=0)
        wide = x.to(tl.float32)
        if GATED:
            up = tl.load(at + WIDTH, mask=column < end, other=0).to(tl.float32)
            wide = (wide / (1 + tl.exp(-wide)) * up).to(x.dtype).to(tl.float32)
        rows += (in_fixed_point(wide, COLUMNS, BITS),)
        rates += (1.0,)
    multiply(
        words,
        scales,
        rows,
        rates,
        values_ptr,
        scales_ptr,
        None,
        out_ptr + part * (ROWS * N),
        group,
        begin,
        end,
        N,
        WIDTH,
        OUT,
        COLUMNS,
        GROUPS,
        BITS,
        ROWS,
    )


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
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Adds and normalises a row, and multiplies every GROUPSth OUT rows of the matrix by it.

    Sums are divided by the norm, as in `row_product_triton`.
    """
    group = tl.program_id(0)
    words, scales = tile(values_ptr, scales_ptr, group, 0, WIDTH, N, WIDTH, OUT, COLUMNS)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    x = tl.load(x_ptr + column, mask=inside, other=0)
    delta = tl.load(delta_ptr + column, mask=inside, other=0)
    weights = tl.load(scale_ptr + column, mask=inside, other=0).to(tl.float32)
    total = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
    if group == 0:
        tl.store(total_ptr + column, total, mask=inside)
    wide = total.to(tl.float32)
    rows = (in_fixed_point(wide * weights, COLUMNS, BITS),)
    rates = (tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + EPS),)
    multiply(
        words,
        scales,
        rows,
        rates,
        values_ptr,
        scales_ptr,
        bias_ptr if HAS_BIAS else None,
        out_ptr,
        group,
        0,
        WIDTH,
        N,
        WIDTH,
        OUT,
        COLUMNS,
        GROUPS,
        BITS,
        1,
    )


@triton.jit
def tile(
    values_ptr,
    scales_ptr,
    nth,
    begin,
    end,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Loads columns `begin` to `end` of the nth OUT rows, four to a word, and their scales."""
    n = nth * OUT + tl.arange(0, OUT)[:, None]
    word = begin // 4 + tl.arange(0, COLUMNS // 4)[None, :]
    block = begin // 32 + tl.arange(0, COLUMNS // 32)[None, :]
    at = values_ptr.to(tl.pointer_type(tl.int32)) + n.to(tl.int64) * (WIDTH // 4) + word
    words = tl.load(at, mask=(n < N) & (word < end // 4), other=0)
    scales = tl.load(scales_ptr + block * N + n, mask=(n < N) & (block < end // 32), other=0)
    return words, scales


@triton.jit
def in_fixed_point(x, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Returns the unit of each block, and its numbers as bytes, four to a word.

    The highest bytes, with the sign, come first. The unit of a block with an infinity or NaN is
    NaN, so that the result is NaN as well.
    """
    blocks = tl.reshape(x, (COLUMNS // 32, 32))
    top = tl.max(tl.abs(blocks), 1)
    known = tl.max((blocks != blocks).to(tl.int32), 1) == 0
    # exponents: the block's largest number is scaled to [2^(BITS - 2), 2^(BITS - 1)); from 32 on
    # neither factor is subnormal or infinite
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 32)
    unit = ((exponent - (BITS - 2)) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 + (BITS - 2) - exponent) << 23).to(tl.float32, bitcast=True)
    whole = tl.floor(blocks * inverse[:, None] + 0.5).to(tl.int32)
    whole = tl.reshape(tl.minimum(whole, 2 ** (BITS - 1) - 1), (COLUMNS,))
    unit = tl.where((exponent < 255) & known, unit, float("nan"))[None, :]
    if BITS == 16:
        return unit, in_words(whole >> 8, COLUMNS), in_words(whole, COLUMNS)
    else:
        highest = in_words(whole >> 16, COLUMNS)
        return unit, highest, in_words(whole >> 8, COLUMNS), in_words(whole, COLUMNS)


@triton.jit
def in_words(numbers, COLUMNS: tl.constexpr):
    """Packs the lowest bytes of every four neighbours, [1, COLUMNS / 4]."""
    shift = (tl.arange(0, 4) * 8)[None, :]
    return tl.sum((tl.reshape(numbers, (COLUMNS // 4, 4)) & 255) << shift, 1)[None, :]


@triton.jit
def multiply(
    words,
    scales,
    rows,
    rates,
    values_ptr,
    scales_ptr,
    bias_ptr,  # [N], or None
    out_ptr,  # [ROWS, N]
    group,
    begin,
    end,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Multiplies rows in fixed point by every GROUPSth tile; the first tile is already loaded."""
    for nth in tl.range(group, tl.cdiv(N, OUT), GROUPS):
        ahead, scales_ahead = tile(
            values_ptr, scales_ptr, nth + GROUPS, begin, end, N, WIDTH, OUT, COLUMNS
        )
        n = nth * OUT + tl.arange(0, OUT)
        scales = scales.to(tl.float32)
        for row in tl.static_range(ROWS):
            # the sum of 32 products of 8 by 16 bits fits in 32 bits
            sums = by_block(dot_of_two(words, rows[row][1], rows[row][2]))
            if BITS == 24:
                sums = sums * 256 + by_block(dot_of_one(words, rows[row][3]))
            # an fma with 0: a plain product may be fused with the addition of another thread's,
            # which skips its rounding, and each thread would get a different sum
            scale, zeros = scales * rows[row][0], tl.zeros(sums.shape, tl.float32)
            terms = tl.fma(sums.to(tl.float32), scale, zeros)
            y = tl.sum(terms, 1) * rates[row]
            y = y.to(out_ptr.dtype.element_ty)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + n, mask=n < N, other=0)
                y = (y.to(tl.float32) + bias.to(tl.float32)).to(y.dtype)
            tl.store(out_ptr + row * N + n, y, mask=n < N)
        words, scales = ahead, scales_ahead


@triton.jit
def by_block(numbers):
    """Adds the eight words of each block."""
    SHAPE: tl.constexpr = (numbers.shape[0], numbers.shape[1] // 8, 8)
    return tl.sum(tl.reshape(numbers, SHAPE), 2).to(tl.float32)


@triton.jit
def dot_of_two(words, high, low):
    """Returns dot products of four signed bytes per word with numbers of two bytes."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sum;
        dp4a.s32.s32 sum, $1, $2, 0;
        shl.b32 sum, sum, 8;
        dp4a.s32.u32 $0, $1, $3, sum;
        }""",
        "=r,r,r,r",
        [words, high, low],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def dot_of_one(words, low):
    """Returns dot products of four signed bytes per word with unsigned bytes."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.u32 $0, $1, $2, 0;",
        "=r,r,r",
        [words, low],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
