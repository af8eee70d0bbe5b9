# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Widens a matrix's codes to bfloat16 in registers, for tensor cores, in Mosaic GPU.

Tensor cores wait for a good part of this, so every instruction counts. Integers become unsigned
bytes, half of their range higher: two to a word, or four if they are smaller than a byte, whose
bits are masked and shifted together. An instruction puts a byte into the mantissa of a float32 with
the exponent of 2^7, or of 2^15 for codes of 8 bits. A fused multiply-add multiplies the sum by the
scale, and its addend removes the constant and has the group's offset. Another instruction rounds
two numbers. Codes that are floats are converted to float16 and float32, two at a time.

Before the last rounding, numbers without an offset are exactly scale · code, for scales of 16 bits
or an integer times a factor; codes that are floats are multiplied in float32. In other cases the
addend has to be rounded to float32: below 2^8 times the scale, it is off by at most 2^-17 times the
scale, else by 2^-24 of itself. 2^15 would be too large for this, so it is subtracted separately
from codes of 8 bits.
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
from jsparse.pallas_kernels.weight_blocks import BLOCK, SUPER, Form

LINES, SEGMENT = 8, 16  # rows of a tile of shared memory; bytes that are swizzled together
EACH = 0x01010101  # the lowest bit of each byte
JOINED = 0x5410  # of prmt: two bytes of a word, then two of another


class Base(NamedTuple):
    """A float32 with room for a byte in its mantissa.

    Attributes:
        number: the float32.
        bits: its bits.
        selector: of prmt, to put the first byte of a word into the mantissa.
        step: what to add to the selector for the next byte.
    """

    number: float
    bits: int
    selector: int
    step: int


SMALL = Base(2.0**7, 0x43000000, 0x7044, 0x100)
LARGE = Base(2.0**15, 0x47000000, 0x7604, 0x10)


def widened(form: Form, chunk: dict[str, Any]) -> list[Any]:
    """Returns tensor core operands, [64, 32] per block.

    Args:
        form: the format of the matrix.
        chunk: 64 rows of the matrix's arrays. Rows of `values` are swizzled; those of `high` have
            16 bytes.
    """
    width = chunk["values"].shape[1]
    made = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    kinds = {name: plgpu.RefType() for name in chunk}
    kinds["values"] = plgpu.RefType(tiled(width, 1))
    blocks = (2 * width if form.bits < 8 else width) // BLOCK

    @plgpu.inline_mgpu(arg_types=(kinds,), return_type=[made] * blocks)
    def widen(_, refs):
        layout, stored = made.layout.to_mgpu(), {**refs}
        for name in stored.keys() & {"values", "high"}:
            stored[name] = Bytes(mgpu.utils.memref_ptr(refs[name]), chunk[name].shape[1])
        arrays = []
        for block in range(blocks):
            registers = block_registers(form, stored, block)
            shaped = np.array(registers, dtype=object).reshape(layout.registers_shape(made.shape))
            arrays.append(mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None))
        return arrays

    return widen(chunk)


class Bytes(NamedTuple):
    """Rows of bytes in shared memory, swizzled over their width."""

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
        pairs, above = _codes(form, stored, own, column, block)
        factors = [
            _factors(form, stored, own, block * BLOCK + first, above)
            for first in range(0, BLOCK, min(form.group, BLOCK))
        ]
        per = len(pairs) // len(factors)  # pairs of a group
        of_rows.append([_products(pair, *factors[nth // per]) for nth, pair in enumerate(pairs)])
    return [number for both in zip(*of_rows, strict=True) for number in both]


def _codes(
    form: Form, stored: dict[str, Any], row: Any, column: Any, block: int
) -> tuple[list[list[Any]], float]:
    """Returns a row's four pairs of codes as float32, and the constant that they are too large by.

    If the matrix has mins, half of the codes' range is not part of the constant.
    """
    values = stored["values"]
    if form.bits < 8:
        words, base = _small_codes(form, stored, row, column, block), SMALL
    else:
        places = range(block * BLOCK, (block + 1) * BLOCK, BLOCK // 4)
        words, base = [values.load_two(row, at, column) for at in places], LARGE
        if form.floats:
            return [_float_codes(word) for word in words], 0.0
        words = [arith.xori(word, constant(word, 0x8080)) for word in words]
    count = 8 // len(words)  # codes in a word
    codes = [_in_mantissa(word, base, nth) for word in words for nth in range(count)]
    above = base.number + (0 if form.mins else form.half)
    if form.bits == 8 and (form.mins or form.supers or form.scales == "float32"):
        codes = [arith.addf(code, constant(code, -above)) for code in codes]
        above = 0.0
    return [codes[nth : nth + 2] for nth in range(0, 8, 2)], above


def _small_codes(
    form: Form, stored: dict[str, Any], row: Any, column: Any, block: int
) -> list[Any]:
    """Returns a row's codes as bytes: four of the block's first half and four of its second."""
    loaded = [
        stored["values"].load_two(row, block * BLOCK // 2 + at, column) for at in (0, BLOCK // 4)
    ]
    word = mgpu.utils.prmt(*loaded, constant(loaded[0], JOINED))
    words = [_masked(word, 15), _masked(_right(word, 4), 15)]
    if form.bits > 4:
        # columns 8 further have bits 4 further, which are moved to bytes of their own
        nbytes = 4 * (form.bits - 4)  # of a block
        left = arith.subi(constant(column, 4), times(divided(column, 4)[0], 2))
        above = []
        for at in range(0, nbytes, 4):
            two = stored["high"].load_two(row, block * nbytes + at, remainder(column, 4))
            two = arith.shli(two, left)
            above.append(arith.ori(two, arith.shli(two, constant(two, 12))))
        if form.bits == 5:  # the bits of the second half follow those of the first
            above.append(_right(above[0], 1))
        highest = form.half * 2 - 16
        words = [
            arith.ori(low, _masked(high, highest)) for low, high in zip(words, above, strict=True)
        ]
    return [arith.xori(word, constant(word, form.half * EACH)) for word in words]


def _right(word: Any, bits: int) -> Any:
    return arith.shrui(word, constant(word, bits))


def _masked(word: Any, byte: int) -> Any:
    """Returns some bits of each byte of a word."""
    return arith.andi(word, constant(word, byte * EACH))


def _in_mantissa(word: Any, base: Base, nth: int) -> Any:
    """Returns a base plus the nth byte of a word."""
    selector = constant(word, base.selector + nth * base.step)
    made = mgpu.utils.prmt(word, constant(word, base.bits), selector)
    return arith.bitcast(ir.F32Type.get(), made)


def _float_codes(word: Any) -> list[Any]:
    """Returns two float8 numbers as float32."""
    two = arith.trunci(ir.IntegerType.get_signless(16), word)
    made = mgpu.utils.inline_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", two, result_types=word.type)
    made = llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), made)
    return [arith.extf(ir.F32Type.get(), vector.extract(made, [], [nth])) for nth in range(2)]


def _factors(
    form: Form, stored: dict[str, Any], row: Any, column: int, above: float
) -> tuple[Any, Any]:
    """Returns a group's scale, and the addend of its products, or None.

    Args:
        form: the format of the matrix.
        stored: references to the arrays of scales and mins.
        row: the row.
        column: the group's column in the chunk.
        above: the constant that codes are too large by.
    """

    def number(name: str, columns: int) -> Any:
        place = arith.constant(ir.IndexType.get(), column // columns)
        return _as_float(memref.load(stored[name], [place, index(row)]))

    scale = number("scales", form.group)
    if form.supers:
        scale = arith.mulf(scale, number("super_scales", SUPER))
    if not above and not form.mins:
        return scale, None
    addend = arith.mulf(scale, constant(scale, -above))
    if form.mins:
        factor = number("super_mins", SUPER) if form.supers else scale
        addend = math.fma(number("mins", form.group), arith.negf(factor), addend)
    return scale, addend


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
