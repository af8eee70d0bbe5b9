"""Implements `api.quantized_product` with jax-triton for a few rows, without tensor cores.

Widening a code takes the same number of instructions as multiplying it, so x is converted to fixed
point instead, block by block. Numbers have 16 bits, or 24 if x is float32, and the largest of a
block of 32 uses all of them. An instruction multiplies four codes, as bytes, by four bytes of x,
and accumulates. The integers of a block are added without rounding, and multiplied by the block's
scale before sums across blocks. Offsets are multiplied by the sum of x. Codes that are floats are
widened, and multiplied by x itself.

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

from jsparse.pallas_kernels.weight_blocks import SUPER, Blocks, form_of, width_of
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


def default_tiling(width: int, bits: int, *, whole: bool) -> BlocksTiling:
    """Returns the fastest tiling measured on an H200, for the matrices of Llama 3.1 8B.

    `whole` requests programs that have all columns.
    """
    columns = triton.next_power_of_2(width if whole or width <= WHOLE else PART)
    rows = min(8 if bits == 8 else 16, 2 ** (15 if bits == 8 else 16) // columns)
    return BlocksTiling(rows, columns, 8, 2 if columns > PART else 4)


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

    out, width = len(matrix["values"]), width_of(matrix)
    tiling = tiling or default_tiling(width, form_of(matrix).bits, whole=False)
    parts = triton.cdiv(width, tiling.columns)
    y = triton_call(
        *(x, *_arrays(matrix)),
        kernel=product_kernel,
        out_shape=jax.ShapeDtypeStruct(
            (parts, *x.shape[:-1], out), dtype if parts == 1 else jnp.float32
        ),
        ROWS=x.size // x.shape[-1],
        CHUNK=triton.cdiv(width, parts * SUPER) * SUPER,
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

    out, width = len(matrix["values"]), width_of(matrix)
    tiling = tiling or default_tiling(width, form_of(matrix).bits, whole=True)
    assert width <= tiling.columns
    whole, y = triton_call(
        *(x, delta, scale, *_arrays(matrix)),
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


def _arrays(matrix: Blocks) -> list[Array]:
    """Returns a matrix's arrays in the kernels' order, with placeholders that are never read."""
    names = "values", "high", "scales", "mins", "super_scales", "super_mins"
    values = jax.lax.bitcast_convert_type(matrix["values"], jnp.int8)
    given: dict[str, Any] = {**matrix, "values": values}
    return [given.get(name, matrix["scales"]) for name in names]


def _launch(x: Array, matrix: Blocks, tiling: BlocksTiling, parts: int) -> dict[str, object]:
    out, width, form = len(matrix["values"]), width_of(matrix), form_of(matrix)
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
        "BITS": 0 if form.floats else 16 if x.dtype.itemsize == 2 else 24,
        "CODE_BITS": form.bits,
        "GROUP": form.group,
        "HALF": form.half if form.mins else 0,
        "MINS": form.mins,
        "SUPERS": form.supers,
    }


@triton.jit
def product_kernel(
    x_ptr,  # [ROWS, WIDTH], or gate and up, [ROWS, 2 · WIDTH], if GATED
    values_ptr,  # [N, bytes]
    high_ptr,  # [N, bytes]
    scales_ptr,  # [WIDTH / GROUP, N]
    mins_ptr,  # [WIDTH / GROUP, N]
    super_scales_ptr,  # [WIDTH / 256, N]
    super_mins_ptr,  # [WIDTH / 256, N]
    out_ptr,  # [parts, ROWS, N]
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    MINS: tl.constexpr,
    SUPERS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiplies CHUNK columns of every GROUPSth OUT rows of the matrix by those of x."""
    part, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    begin, end = part * CHUNK, tl.minimum(part * CHUNK + CHUNK, WIDTH)
    pointers = values_ptr, high_ptr, scales_ptr, mins_ptr, super_scales_ptr, super_mins_ptr
    first = tile(
        pointers, group, begin, end, N, WIDTH, OUT, COLUMNS, CODE_BITS, GROUP, MINS, SUPERS
    )
    column = begin + tl.arange(0, COLUMNS)
    rows, rates = (), ()
    for row in tl.static_range(ROWS):
        at = x_ptr + row * (2 * WIDTH if GATED else WIDTH) + column
        x = tl.load(at, mask=column < end, other=0)
        wide = x.to(tl.float32)
        if GATED:
            up = tl.load(at + WIDTH, mask=column < end, other=0).to(tl.float32)
            wide = (wide / (1 + tl.exp(-wide)) * up).to(x.dtype).to(tl.float32)
        rows += (factors(wide, COLUMNS, BITS, CODE_BITS),)
        rates += (1.0,)
    multiply(
        first,
        rows,
        rates,
        pointers,
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
        CODE_BITS,
        GROUP,
        HALF,
        MINS,
        SUPERS,
        ROWS,
    )


@triton.jit
def norm_product_kernel(
    x_ptr,  # [WIDTH]
    delta_ptr,  # [WIDTH]
    scale_ptr,  # [WIDTH]
    values_ptr,  # [N, bytes]
    high_ptr,  # [N, bytes]
    scales_ptr,  # [WIDTH / GROUP, N]
    mins_ptr,  # [WIDTH / GROUP, N]
    super_scales_ptr,  # [WIDTH / 256, N]
    super_mins_ptr,  # [WIDTH / 256, N]
    bias_ptr,  # [N], read where HAS_BIAS
    total_ptr,  # [WIDTH]
    out_ptr,  # [N]
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    MINS: tl.constexpr,
    SUPERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Adds and normalises a row, and multiplies every GROUPSth OUT rows of the matrix by it.

    Sums are divided by the norm, as in `row_product_triton`.
    """
    group = tl.program_id(0)
    pointers = values_ptr, high_ptr, scales_ptr, mins_ptr, super_scales_ptr, super_mins_ptr
    first = tile(pointers, group, 0, WIDTH, N, WIDTH, OUT, COLUMNS, CODE_BITS, GROUP, MINS, SUPERS)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    x = tl.load(x_ptr + column, mask=inside, other=0)
    delta = tl.load(delta_ptr + column, mask=inside, other=0)
    weights = tl.load(scale_ptr + column, mask=inside, other=0).to(tl.float32)
    total = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
    if group == 0:
        tl.store(total_ptr + column, total, mask=inside)
    wide = total.to(tl.float32)
    rows = (factors(wide * weights, COLUMNS, BITS, CODE_BITS),)
    rates = (tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + EPS),)
    multiply(
        first,
        rows,
        rates,
        pointers,
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
        CODE_BITS,
        GROUP,
        HALF,
        MINS,
        SUPERS,
        1,
    )


@triton.jit
def tile(
    pointers,
    nth,
    begin,
    end,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MINS: tl.constexpr,
    SUPERS: tl.constexpr,
):
    """Loads columns `begin` to `end` of the nth OUT rows of the matrix, as words of four bytes.

    Arrays that the matrix does not have are replaced by others.
    """
    values_ptr, high_ptr, scales_ptr, mins_ptr, super_scales_ptr, super_mins_ptr = pointers
    n = nth * OUT + tl.arange(0, OUT)[:, None]
    WORDS: tl.constexpr = 8 if CODE_BITS == 8 else 4  # of a block
    words = load_words(values_ptr, n, begin, end, N, WIDTH, COLUMNS, WORDS)
    high = words
    if CODE_BITS == 5:
        high = load_words(high_ptr, n, begin, end, N, WIDTH, COLUMNS, 1)
    elif CODE_BITS == 6:
        high = load_words(high_ptr, n, begin, end, N, WIDTH, COLUMNS, 2)
    # a scale per block, or per half of one; a group of several blocks is read once per block
    PER: tl.constexpr = GROUP if GROUP < 32 else 32
    place = tl.arange(0, COLUMNS // PER)[None, :]
    there = (n < N) & (begin + place * PER < end)
    at = (begin // GROUP + place // (GROUP // PER)) * N + n
    scales = tl.load(scales_ptr + at, mask=there, other=0)
    mins, super_scales, super_mins = scales, scales, scales
    if MINS:
        mins = tl.load(mins_ptr + at, mask=there, other=0)
    if SUPERS:
        above = (begin // 256 + place // (256 // PER)) * N + n
        super_scales = tl.load(super_scales_ptr + above, mask=there, other=0)
        if MINS:
            super_mins = tl.load(super_mins_ptr + above, mask=there, other=0)
    return words, high, scales, mins, super_scales, super_mins


@triton.jit
def load_words(
    pointer,
    n,
    begin,
    end,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Loads the words of blocks that have WORDS of them."""
    word = begin // 32 * WORDS + tl.arange(0, COLUMNS // 32 * WORDS)[None, :]
    at = pointer.to(tl.pointer_type(tl.int32)) + n.to(tl.int64) * (WIDTH // 32 * WORDS) + word
    return tl.load(at, mask=(n < N) & (word < end // 32 * WORDS), other=0)


@triton.jit
def factors(x, COLUMNS: tl.constexpr, BITS: tl.constexpr, CODE_BITS: tl.constexpr):
    """Returns a row in the form in which it is multiplied by codes."""
    if BITS == 0:  # by its place in a word
        even, odd = tl.split(tl.reshape(x, (COLUMNS // 4, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first[None, :], second[None, :], third[None, :], fourth[None, :]
    else:
        return in_fixed_point(x, COLUMNS, BITS, CODE_BITS)


@triton.jit
def in_fixed_point(x, COLUMNS: tl.constexpr, BITS: tl.constexpr, CODE_BITS: tl.constexpr):
    """Returns the unit of each block, its sum in units, and its numbers as bytes, four to a word.

    The highest bytes, with the sign, come first. For codes of less than a byte, a block's halves
    are separate: their sums, and their words. The unit of a block with an infinity or NaN is NaN,
    so that the result is NaN as well.
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
    whole = tl.minimum(whole, 2 ** (BITS - 1) - 1)
    unit = tl.where((exponent < 255) & known, unit, float("nan"))[None, :]
    if CODE_BITS == 8:
        whole = tl.reshape(whole, (COLUMNS,))
        if BITS == 16:
            return unit, in_words(whole >> 8), in_words(whole)
        else:
            return unit, in_words(whole >> 16), in_words(whole >> 8), in_words(whole)
    else:
        halves = tl.permute(tl.reshape(whole, (COLUMNS // 32, 2, 16)), (0, 2, 1))
        first, second = tl.split(halves)  # [blocks, 16]
        return (
            unit,
            tl.sum(first, 1)[None, :],
            tl.sum(second, 1)[None, :],
            in_words(first >> 8),
            in_words(second >> 8),
            in_words(first),
            in_words(second),
        )


@triton.jit
def in_words(numbers):
    """Packs the lowest bytes of every four neighbours, [1, numbers / 4]."""
    shift = (tl.arange(0, 4) * 8)[None, :]
    return tl.sum((tl.reshape(numbers, (numbers.numel // 4, 4)) & 255) << shift, 1)[None, :]


@triton.jit
def multiply(
    loaded,
    rows,
    rates,
    pointers,
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
    CODE_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    MINS: tl.constexpr,
    SUPERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Multiplies rows by every GROUPSth tile; the first tile is already loaded."""
    for nth in tl.range(group, tl.cdiv(N, OUT), GROUPS):
        ahead = tile(
            pointers,
            nth + GROUPS,
            begin,
            end,
            N,
            WIDTH,
            OUT,
            COLUMNS,
            CODE_BITS,
            GROUP,
            MINS,
            SUPERS,
        )
        n = nth * OUT + tl.arange(0, OUT)
        words, high, scales, mins, super_scales, super_mins = loaded
        scales = scales.to(tl.float32)
        if SUPERS:
            scales *= super_scales.to(tl.float32)
        offsets = scales
        if MINS:
            offsets = mins.to(tl.float32) * (super_mins.to(tl.float32) if SUPERS else scales)
        for row in tl.static_range(ROWS):
            if BITS == 0:
                terms = terms_of_floats(words, scales, rows[row])
            elif CODE_BITS == 8:
                terms = terms_of_bytes(words, scales, rows[row], BITS)
            else:
                terms = terms_of_halves(
                    words, high, scales, offsets, rows[row], BITS, CODE_BITS, GROUP, HALF
                )
            y = tl.sum(terms, 1) * rates[row]
            y = y.to(out_ptr.dtype.element_ty)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + n, mask=n < N, other=0)
                y = (y.to(tl.float32) + bias.to(tl.float32)).to(y.dtype)
            tl.store(out_ptr + row * N + n, y, mask=n < N)
        loaded = ahead


@triton.jit
def times(left, right):
    """Returns a product that is rounded.

    It is an fma with 0: a plain product may be fused with the addition of another thread's, which
    skips its rounding, and each thread would get a different sum.
    """
    return tl.fma(left, right, tl.zeros(left.shape, tl.float32))


@triton.jit
def terms_of_floats(words, scales, x):
    """Returns each block's product with x, for codes that are floats."""
    sums = by_block(dot_of_floats(words, x[0], x[1], x[2], x[3]), 8)
    return times(sums, scales)


@triton.jit
def terms_of_bytes(words, scales, row, BITS: tl.constexpr):
    """Returns each block's product with a row in fixed point, for codes of 8 bits."""
    # the sum of 32 products of 8 by 16 bits fits in 32 bits
    sums = by_block(dot_of_two(words, row[1], row[2]), 8).to(tl.float32)
    if BITS == 24:
        sums = sums * 256 + by_block(dot_of_one(words, row[3]), 8).to(tl.float32)
    return times(sums, tl.broadcast_to(scales * row[0], sums.shape))


@triton.jit
def terms_of_halves(
    words,
    high,
    scales,
    offsets,
    row,
    BITS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
):
    """Returns each block's product with a row in fixed point, for codes of less than 8 bits."""
    # codes in the highest bits of a byte, whose sign is theirs
    UNUSED: tl.constexpr = 8 - CODE_BITS
    SHAPE: tl.constexpr = (words.shape[0], words.shape[1] // 4, 4)
    LOW: tl.constexpr = -0x0F0F0F10 if CODE_BITS == 4 else 0x0F0F0F0F << UNUSED  # of 32 bits
    first, second = words << UNUSED & LOW, (words >> 4 - UNUSED) & LOW
    j = (tl.arange(0, 4) * 2)[None, None, :]
    if CODE_BITS == 5:
        first |= tl.reshape((high[:, :, None] << (7 - j)) & -0x7F7F7F80, words.shape)
        second |= tl.reshape((high[:, :, None] << (6 - j)) & -0x7F7F7F80, words.shape)
    elif CODE_BITS == 6:
        of_first, of_second = tl.split(tl.reshape(high, (SHAPE[0], SHAPE[1], 2)))
        first |= tl.reshape((of_first[:, :, None] << (6 - j)) & -0x3F3F3F40, words.shape)
        second |= tl.reshape((of_second[:, :, None] << (6 - j)) & -0x3F3F3F40, words.shape)
    if GROUP == 16:
        a = by_block(dot_of_two(first, row[3], row[5]), 4) >> UNUSED
        b = by_block(dot_of_two(second, row[4], row[6]), 4) >> UNUSED
        PAIRS: tl.constexpr = (scales.shape[0], scales.shape[1] // 2, 2)
        of_a, of_b = tl.split(tl.reshape(scales, PAIRS))
        terms = term(a, row[1], of_a, row[0], HALF) + term(b, row[2], of_b, row[0], HALF)
        if HALF > 0:
            of_a, of_b = tl.split(tl.reshape(offsets, PAIRS))
            terms -= times(of_a, tl.broadcast_to(row[1].to(tl.float32) * row[0], terms.shape))
            terms -= times(of_b, tl.broadcast_to(row[2].to(tl.float32) * row[0], terms.shape))
    else:
        dots = dot_of_four(first, second, row[3], row[4], row[5], row[6])
        sums = by_block(dots, 4) >> UNUSED
        terms = term(sums, row[1] + row[2], scales, row[0], HALF)
        if HALF > 0:
            sum_of_x = (row[1] + row[2]).to(tl.float32) * row[0]
            terms -= times(offsets, tl.broadcast_to(sum_of_x, terms.shape))
    return terms


@triton.jit
def term(sums, sum_of_x, scales, unit, HALF: tl.constexpr):
    """Returns scale · (sums + HALF · sum of x), all in units of x."""
    wide = (sums + HALF * sum_of_x).to(tl.float32)
    return times(wide, tl.broadcast_to(scales * unit, wide.shape))


@triton.jit
def by_block(numbers, WORDS: tl.constexpr):
    """Adds the words of each block."""
    SHAPE: tl.constexpr = (numbers.shape[0], numbers.shape[1] // WORDS, WORDS)
    return tl.sum(tl.reshape(numbers, SHAPE), 2)


@triton.jit
def dot_of_floats(words, first, second, third, fourth):
    """Returns dot products of four 8-bit floats per word with numbers."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, h<4>;
        .reg .b32 two, more;
        .reg .f32 f<4>, sum;
        mov.b32 {low, high}, $1;
        cvt.rn.f16x2.e4m3x2 two, low;
        cvt.rn.f16x2.e4m3x2 more, high;
        mov.b32 {h0, h1}, two;
        mov.b32 {h2, h3}, more;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        mul.f32 sum, f0, $2;
        fma.rn.f32 sum, f1, $3, sum;
        fma.rn.f32 sum, f2, $4, sum;
        fma.rn.f32 $0, f3, $5, sum;
        }""",
        "=f,r,f,f,f,f",
        [words, first, second, third, fourth],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def dot_of_four(first, second, first_high, second_high, first_low, second_low):
    """Returns dot products of eight signed bytes in two words with numbers of two bytes."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sum;
        dp4a.s32.s32 sum, $1, $3, 0;
        dp4a.s32.s32 sum, $2, $4, sum;
        shl.b32 sum, sum, 8;
        dp4a.s32.u32 sum, $1, $5, sum;
        dp4a.s32.u32 $0, $2, $6, sum;
        }""",
        "=r,r,r,r,r,r,r",
        [first, second, first_high, second_high, first_low, second_low],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


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
