# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Widens a matrix's codes to bfloat16 in registers, for tensor cores, in Mosaic GPU.

Tensor cores wait for a good part of this, so every instruction counts. An instruction puts a code
into the mantissa of a float32, half of its range higher, so that it is not negative. The exponent
depends on the place of the code in its word: the float32 is 2^15 + half + code for 8 bits, and 2^8
or 2^4 + half + code for 4 bits. Codes of 5 and 6 bits become bytes first, four to a word, and then
2^7 + half + code. A fused multiply-add multiplies this by the scale, and its addend removes the
constant and has the group's offset. Another instruction rounds two numbers. Codes that are floats
are converted to float16 and float32, two at a time.

Before the last rounding, numbers without an offset are exactly scale · code, for scales of 16 bits
or an integer times a factor; codes that are floats are multiplied in float32. In other cases the
addend is rounded to float32: below 2^9 times the scale, it is off by at most 2^-16 times the scale,
else by 2^-24 of itself. 2^15 would be too large for this, so it is subtracted separately from codes
of 8 bits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from jsparse.pallas_kernels.mosaic_registers import (
    constant,
    divided,
    index,
    plus,
    position,
    remainder,
    times,
)
from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS, tiled
from jsparse.pallas_kernels.weight_blocks import BLOCK, SUPER, Form, out_axis

LINES, SEGMENT = 8, 16  # rows of a tile of shared memory; bytes that are swizzled together
EACH = 0x01010101  # the lowest bit of each byte
JOINED = 0x5410  # of prmt: two bytes of a word, then two of another
# the exponents of the float32 of a code: of 8 bits; of 4 bits, in the first and the second half of
# a block; of a byte with a smaller code, and prmt's selector of the first such byte
LARGE, FIRST, SECOND, SMALL = 15, 8, 4, 7
SELECTOR = 0x7044


def widened(form: Form, chunk: dict[str, Any], nth: Any) -> list[Any]:
    """Returns tensor core operands, [64, 32] per block.

    Args:
        form: the format of the matrix.
        chunk: 64 rows of the matrix's arrays. Rows of `values` and `high` are swizzled if they have
            more than 16 bytes.
        nth: the index of the chunk. Rows of `high` may span several chunks.
    """
    made = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    widths = {name: chunk[name].shape[1] for name in chunk if out_axis(name) == 0}
    kinds = {name: plgpu.RefType() for name in chunk}
    kinds |= {name: plgpu.RefType(tiled(n, 1)) for name, n in widths.items() if n > SEGMENT}
    blocks = widths["values"] * (2 if form.bits < 8 else 1) // BLOCK

    @plgpu.inline_mgpu(arg_types=(kinds, plgpu.Layout.WG_SPLAT), return_type=[made] * blocks)
    def widen(_, refs, nth):
        layout, stored = made.layout.to_mgpu(), {**refs}
        for name, width in widths.items():
            memory, own = mgpu.utils.memref_ptr(refs[name]), blocks * 4 * (form.bits - 4)
            if name == "high" and own < width:
                skipped = times(remainder(nth.registers.item(), width // own), own)
                memory = mgpu.utils.getelementptr(memory, [skipped], ir.IntegerType.get_signless(8))
            stored[name] = Bytes(memory, width)
        arrays = []
        for block in range(blocks):
            registers = block_registers(form, stored, block)
            shaped = np.array(registers, dtype=object).reshape(layout.registers_shape(made.shape))
            arrays.append(mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None))
        return arrays

    return widen(chunk, nth)


class Bytes(NamedTuple):
    """Rows of bytes in shared memory, swizzled over their width if it is more than a segment."""

    memory: Any
    width: int

    def load_two(self, row: Any, at: int, beyond: Any) -> Any:
        """Loads two bytes of a row into a word, `beyond` bytes after `at` in the same segment."""
        segment, within = divmod(at, SEGMENT)
        swizzle = divided(divided(row, LINES)[1], LINES * SEGMENT // self.width)[0]
        place = times(arith.xori(swizzle, constant(swizzle, segment)), SEGMENT)
        place = arith.addi(arith.addi(times(row, self.width), beyond), plus(place, within))
        byte, two, word = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
        pointer = mgpu.utils.getelementptr(self.memory, [place], byte)
        return arith.extui(word, llvm.load(two, pointer, alignment=2))


def block_registers(form: Form, stored: dict[str, Any], block: int) -> list[Any]:
    """Returns a thread's numbers of a block: pairs of columns of a row and of that 8 below it.

    Args:
        form: the format of the matrix.
        stored: `values` and `high` as `Bytes`, and references to the other arrays.
        block: the index of the block.
    """
    row, column = position()
    of_rows = []
    for own in (row, plus(row, LINES)):
        made, factors = [], None
        for half, (codes, above) in enumerate(_halves(form, stored, own, column, block)):
            if factors is None or form.group < BLOCK:
                first = block * BLOCK + half * BLOCK // 2
                factors = _scale_and_offset(form, stored, own, first)
            addend = _addend(*factors, above)
            made += [_products(codes[nth : nth + 2], factors[0], addend) for nth in (0, 2)]
        of_rows.append(made)
    return [number for both in zip(*of_rows, strict=True) for number in both]


def _halves(
    form: Form, stored: dict[str, Any], row: Any, column: Any, block: int
) -> list[tuple[list[Any], float]]:
    """Returns a row's codes of each half of a block as float32, and by how much they are too large.

    If the matrix has mins, half of the codes' range belongs to the codes.
    """
    nbytes = BLOCK if form.bits == 8 else BLOCK // 2
    words = [
        stored["values"].load_two(row, block * nbytes + at, column)
        for at in range(0, nbytes, BLOCK // 4)
    ]
    if form.floats:
        codes = [code for word in words for code in _float_codes(word)]
        return [(codes[:4], 0.0), (codes[4:], 0.0)]
    half = 0 if form.mins else form.half
    if form.bits == 4:
        return [
            ([_placed(word, at + n, to, 4) for word in words for n in (0, 8)], 2.0**to + half)
            for at, to in ((0, FIRST), (4, SECOND))
        ]
    if form.bits < 8:
        words = _whole_codes(form, words, stored["high"], row, column, block)
        return [([_byte(word, n) for n in range(4)], 2.0**SMALL + half) for word in words]
    codes, above = [_placed(word, n, LARGE, 8) for word in words for n in (0, 8)], 2.0**LARGE + half
    if form.mins or form.supers or form.scales == "float32":
        codes, above = [arith.addf(code, constant(code, -above)) for code in codes], 0.0
    return [(codes[:4], above), (codes[4:], above)]


def _float_codes(word: Any) -> list[Any]:
    """Returns two float8 numbers as float32."""
    two = arith.trunci(ir.IntegerType.get_signless(16), word)
    made = mgpu.utils.inline_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", two, result_types=word.type)
    made = llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), made)
    return [arith.extf(ir.F32Type.get(), vector.extract(made, [], [nth])) for nth in range(2)]


def _placed(word: Any, at: int, exponent: int, bits: int) -> Any:
    """Returns 2^exponent plus the code at a bit of a word, as float32."""
    unit = 23 - exponent  # the bit of 1
    moved = arith.shli(word, constant(word, unit - at)) if unit > at else word
    code = constant(word, (1 << bits) - 1 << unit)
    # flips the sign of the code, which adds half of the range
    flipped = constant(word, 127 + exponent << 23 | 1 << unit + bits - 1)
    return arith.bitcast(ir.F32Type.get(), _and_xor(moved, code, flipped))


def _and_xor(x: Any, y: Any, z: Any) -> Any:
    """Returns (x & y) ^ z in one instruction; the compiler takes two for constants."""
    return mgpu.utils.inline_ptx("lop3.b32 $0, $1, $2, $3, 0x6A;", x, y, z, result_types=x.type)


def _byte(word: Any, nth: int) -> Any:
    """Returns 2^7 plus the nth byte of a word, as float32."""
    exponent, selector = (constant(word, n) for n in (127 + SMALL << 23, SELECTOR + 0x100 * nth))
    return arith.bitcast(ir.F32Type.get(), mgpu.utils.prmt(word, exponent, selector))


def _whole_codes(
    form: Form, words: list[Any], high: Bytes, row: Any, column: Any, block: int
) -> list[Any]:
    """Returns codes of 5 or 6 bits as bytes, a word for each half of a block.

    Args:
        form: the format of the matrix.
        words: two words with the lowest bits of two columns of each half.
        high: the other bits.
        row: the row.
        column: the first column.
        block: the index of the block.
    """
    # columns 8 further have bits 4 further, which are moved to bytes of their own
    nbytes = 4 * (form.bits - 4)  # of a block
    left = arith.subi(constant(column, 4), times(divided(column, 4)[0], 2))
    signs = EACH << 4 | EACH << 5 if form.bits == 5 else EACH << 5
    above = []
    for at in range(0, nbytes, 4):
        two = arith.shli(high.load_two(row, block * nbytes + at, remainder(column, 4)), left)
        both = arith.ori(two, arith.shli(two, constant(two, 12)))
        above.append(arith.xori(both, constant(both, signs)))
    if form.bits == 5:  # the bits of the second half follow those of the first
        above.append(_right(above[0], 1))
    low = mgpu.utils.prmt(*words, constant(words[0], JOINED))
    return [
        arith.ori(_masked(four, 15), _masked(others, 2 * form.half - 16))
        for four, others in zip((low, _right(low, 4)), above, strict=True)
    ]


def _right(word: Any, bits: int) -> Any:
    return arith.shrui(word, constant(word, bits))


def _masked(word: Any, byte: int) -> Any:
    """Returns some bits of each byte of a word."""
    return arith.andi(word, constant(word, byte * EACH))


def _scale_and_offset(form: Form, stored: dict[str, Any], row: Any, column: int) -> tuple[Any, Any]:
    """Returns the scale and the offset, or None, of the group of a row that has this column."""

    def number(name: str, columns: int) -> Any:
        place = arith.constant(ir.IndexType.get(), column // columns)
        return _as_float(memref.load(stored[name], [place, index(row)]))

    scale = number("scales", form.group)
    if form.supers:
        scale = arith.mulf(scale, number("super_scales", SUPER))
    if not form.mins:
        return scale, None
    factor = number("super_mins", SUPER) if form.supers else scale
    return scale, arith.mulf(number("mins", form.group), factor)


def _addend(scale: Any, offset: Any, above: float) -> Any:
    """Returns the number that removes a constant, times the scale, and the offset, or None."""
    if offset is None:
        return arith.mulf(scale, constant(scale, -above)) if above else None
    return math.fma(scale, constant(scale, -above), arith.negf(offset))


def _as_float(x: Any) -> Any:
    """Returns a number of 8, 16 or 32 bits as float32."""
    wide = ir.F32Type.get()
    if x.type == wide:
        return x
    if not isinstance(x.type, ir.IntegerType):
        return arith.extf(wide, x)
    return arith.sitofp(wide, arith.extsi(ir.IntegerType.get_signless(32), x))


def _products(codes: list[Any], scale: Any, addend: Any) -> Any:
    """Returns two codes times their scale, plus an addend or None, rounded to bfloat16."""
    floats, rounded = (
        ir.VectorType.get((2,), kind) for kind in (ir.F32Type.get(), ir.BF16Type.get())
    )
    products = [
        arith.mulf(code, scale) if addend is None else math.fma(code, scale, addend)
        for code in codes
    ]
    return arith.truncf(rounded, vector.from_elements(floats, products))
