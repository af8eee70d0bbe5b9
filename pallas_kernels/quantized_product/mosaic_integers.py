# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Converts rows to fixed point and multiplies integers in tensor cores, in Mosaic GPU.

A block of 32 numbers of a row becomes 16-bit integers and their unit, a power of two that fits the
largest of them. Tensor cores multiply bytes, so each integer is 256 · high + low, with its two
digits in two rows. If all eight bits of the bfloat16 mantissa of a block's largest number are set,
its unit is doubled, because 128 would not fit in the high digit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, nvvm, vector
from jaxtyping import Array, BFloat16, Float32, Int8

from jsparse.pallas_kernels.mosaic_registers import (
    THREADS,
    below,
    constant,
    divided,
    index,
    plus,
    remainder,
    times,
)
from jsparse.pallas_kernels.quantized_product.mosaic_codes import Stored, code_registers, operands
from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS, tiled
from jsparse.pallas_kernels.weight_blocks import BLOCK

SWIZZLE = 128  # bytes; also columns of a tile of 8 rows
TILE = 8 * SWIZZLE
ROUND_UP = 1 << 16  # moves a float32 with a mantissa of seven leading ones to the next exponent
BITS = 14  # bits of an integer after the first
INFINITE = 0x7F800000  # from here on, infinity or NaN
LEAST = 24  # exponents are clamped to at least this, so that units are not subnormal
NOT_A_NUMBER = 0x7FC00000
AT_ONCE = 4  # blocks that a thread loads before it stores any
WHOLE = 12_582_912.0  # 1.5 · 2^23: added to a float32, the last bits are the rounded integer


class Digits(NamedTuple):
    """The arrangement of rows in fixed point.

    Eight rows or more have a column of the product each, and two rows of digits: the high digits of
    all, then the low ones. Tensor cores take at least eight rows of digits. One, two or four rows
    are diagonal: each of 4, 2 or 1 consecutive segments of columns has rows of digits of its own,
    which are 0 elsewhere, so that one product is that of several segments.

    Attributes:
        padded: rows of x: 1, 2, 4, or a multiple of 8.
        segment: columns with the same scale in a block, 16 or 32.
        shift: bits by which codes are larger than they mean; a unit is that much smaller.
        sums: the factor of the sums of x; 0: they are not needed.
    """

    padded: int
    segment: int = BLOCK
    shift: int = 0
    sums: int = 0

    @property
    def diagonal(self) -> int:
        """The number of segments per product; 0: rows of digits have all columns."""
        return 4 // self.padded

    @property
    def rows(self) -> int:
        """Rows of digits."""
        return 8 if self.diagonal else 2 * self.padded

    @property
    def columns(self) -> int:
        """Columns of a sum of products."""
        return max(self.padded, 8)


def fixed_point(
    x: BFloat16[Array, "rows in"], digits: Digits
) -> tuple[
    Int8[Array, "digits in"], Float32[Array, "blocks rows"], Float32[Array, "segments rows"]
]:
    """Returns the digits, the blocks' units, and the segments' sums of x."""
    wide = x.astype(jnp.float32).reshape(len(x), -1, BLOCK)
    top = jnp.max(lax.bitcast_convert_type(jnp.abs(wide), jnp.uint32), -1)
    exponent = jnp.maximum((top + ROUND_UP) >> 23, LEAST)
    unit = jnp.where(top >= INFINITE, NOT_A_NUMBER, (exponent - BITS) << 23)
    inverse = lax.bitcast_convert_type((254 + BITS - exponent) << 23, jnp.float32)
    integers = jnp.round(wide * inverse[..., None]).astype(jnp.int32)
    high, low = (integers + 128) >> 8, integers.astype(jnp.int8).astype(jnp.int32)
    both = jnp.stack([high, low]).reshape(2, *x.shape)
    if digits.diagonal:  # row 2 (padded · class + row) + digit
        of_class = jnp.arange(x.shape[1]) // digits.segment % digits.diagonal
        own = of_class == jnp.arange(digits.diagonal)[:, None, None, None]
        both = jnp.where(own, both.swapaxes(0, 1), 0)
    units = lax.bitcast_convert_type(unit, jnp.float32).T
    sums = jnp.sum(integers.reshape(len(x), -1, digits.segment), -1).T
    sums = digits.sums * sums * jnp.repeat(units, BLOCK // digits.segment, 0)
    both = both.astype(jnp.int8).reshape(digits.rows, -1)
    return both, units * 2.0**-digits.shift, sums


def put_in_fixed_point(
    x: Any, digits_s: Any, units_s: Any, sums_s: Any, first: Any, warpgroups: int, form: Digits
) -> None:
    """Computes `fixed_point` of the columns from `first` on for which `digits_s` has room.

    Args:
        x: [rows, in] of bfloat16, in global memory.
        digits_s: [rows of digits, columns]; those of rows past the end of x are not written.
        units_s: [columns / 32, padded]; units of blocks past the end of x become 0.
        sums_s: [columns / segment, padded], or a placeholder.
        first: the first column.
        warpgroups: the number of warpgroups that share the work.
        form: the arrangement.
    """
    kinds = plgpu.RefType(), plgpu.RefType(tiled(SWIZZLE, 1)), plgpu.RefType(), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(*kinds, plgpu.Layout.WG_SPLAT))
    def put_all(_, x, digits, units, sums, first):
        rows, width = x.type.shape
        columns, padded = digits.type.shape[1] * SWIZZLE, form.padded
        begin, (to, at_x) = first.registers.item(), map(mgpu.utils.memref_ptr, (digits, x))
        blocks, threads, per_block = columns // BLOCK, warpgroups * THREADS, BLOCK // form.segment

        def load(nth):
            row, block = divided(nth, blocks)
            column = arith.addi(begin, times(block, BLOCK))
            # columns past the end count as 0, whatever they contain
            there = below(column, width)
            column = arith.minui(column, constant(column, width - BLOCK))
            return row, block, there, _load_block(at_x, arith.addi(times(row, width), column))

        def put_digits(row, block, halves):
            of_row, line = divided(row, 8)
            of_block, start = divided(times(block, BLOCK), SWIZZLE)
            tile = arith.addi(times(of_row, columns // SWIZZLE), of_block)
            place = arith.addi(times(tile, TILE), times(line, SWIZZLE))
            for half in range(2):  # 16 bytes are swizzled together
                swizzled = arith.xori(plus(start, 16 * half), times(line, 16))
                _store(halves[half], to, arith.addi(place, swizzled))

        def put_diagonal(row, block, both):
            for of_class in range(form.diagonal):
                own = []
                for half in range(2):
                    segment = plus(times(block, per_block), half * per_block // 2)
                    here = remainder(segment, form.diagonal)
                    own.append(arith.cmpi(arith.CmpIPredicate.eq, here, constant(here, of_class)))
                for digit, halves in enumerate(both):
                    zero = mgpu.c(0, halves[0].type)
                    some = [arith.select(*pair, zero) for pair in zip(own, halves, strict=True)]
                    place = plus(times(row, 2), 2 * padded * of_class + digit)
                    put_digits(place, block, some)

        def put(row, block, there, numbers):
            high, low, unit, sums_of = _in_fixed_point(numbers)
            unit = arith.select(there, unit, constant(unit, 0.0))
            if form.diagonal:
                put_diagonal(row, block, (high, low))
            else:
                put_digits(row, block, high)
                put_digits(plus(row, padded), block, low)
            scaled = arith.mulf(unit, constant(unit, 2.0**-form.shift))
            memref.store(scaled, units, [index(block), index(row)])
            if not form.sums:
                return
            if per_block == 1:
                sums_of = [arith.addi(*sums_of)]
            for nth, one in enumerate(sums_of):
                place = index(plus(times(block, per_block), nth))
                number = arith.mulf(arith.sitofp(unit.type, times(one, form.sums)), unit)
                memref.store(number, sums, [place, index(row)])

        of_thread, all_of_them = remainder(mgpu.thread_idx(), threads), rows * blocks
        for start in range(0, all_of_them, AT_ONCE * threads):
            last = min(start + AT_ONCE * threads, all_of_them)
            places = [plus(of_thread, nth) for nth in range(start, last, threads)]
            end = constant(of_thread, all_of_them - 1)
            # issue all loads before using any
            loaded = [load(arith.minui(nth, end)) for nth in places]
            for nth, one in zip(places, loaded, strict=True):
                with mgpu.when(below(nth, all_of_them)):
                    put(*one)

    put_all(x, digits_s, units_s, sums_s, first)


def _load_block(x: Any, at: Any) -> list[Any]:
    """Loads a block of numbers, eight at a time."""
    kind = ir.VectorType.get((8,), ir.BF16Type.get())
    places = (mgpu.utils.getelementptr(x, [plus(at, n)], kind.element_type) for n in (0, 8, 16, 24))
    return [llvm.load(kind, place, alignment=16) for place in places]


def _in_fixed_point(numbers: list[Any]) -> tuple[list[Any], list[Any], Any, list[Any]]:
    """Returns a block's high digits, 16 and 16, its low digits, its unit, and its halves' sums."""
    floats, integers = (
        ir.VectorType.get((16,), kind)
        for kind in (ir.F32Type.get(), ir.IntegerType.get_signless(32))
    )
    halves = [
        arith.extf(floats, vector.shuffle(*numbers[n : n + 2], list(range(16)))) for n in (0, 2)
    ]
    top = arith.maximumf(*(math.absf(half) for half in halves))
    top = vector.reduction(ir.F32Type.get(), vector.CombiningKind.MAXIMUMF, top)
    top = arith.bitcast(ir.IntegerType.get_signless(32), top)
    exponent = arith.shrui(plus(top, ROUND_UP), constant(top, 23))
    exponent = arith.maxui(exponent, constant(exponent, LEAST))
    unit, inverse = (
        arith.shli(some, constant(some, 23))
        for some in (
            plus(exponent, -BITS),
            arith.subi(constant(exponent, 254 + BITS), exponent),
        )
    )
    lost = arith.cmpi(arith.CmpIPredicate.uge, top, constant(top, INFINITE))
    unit = arith.select(lost, constant(unit, NOT_A_NUMBER), unit)
    inverse = vector.broadcast(floats, arith.bitcast(ir.F32Type.get(), inverse))
    bytes_ = ir.VectorType.get((16,), ir.IntegerType.get_signless(8))
    word = ir.IntegerType.get_signless(32)
    high, low, sums = [], [], []
    for half in halves:
        moved = arith.addf(arith.mulf(half, inverse), mgpu.c(WHOLE, floats))
        whole = arith.bitcast(integers, moved)
        above = arith.shrui(arith.addi(whole, mgpu.c(128, integers)), mgpu.c(8, integers))
        high.append(arith.trunci(bytes_, above))
        low.append(arith.trunci(bytes_, whole))
        of_high, of_low = (
            vector.reduction(word, vector.CombiningKind.ADD, arith.extsi(integers, some[-1]))
            for some in (high, low)
        )
        sums.append(arith.addi(times(of_high, 256), of_low))
    return high, low, arith.bitcast(ir.F32Type.get(), unit), sums


def _store(value: Any, pointer: Any, byte: Any) -> None:
    """Stores 16 bytes."""
    place = mgpu.utils.getelementptr(pointer, [byte], ir.IntegerType.get_signless(8))
    llvm.store(value, place, alignment=16)


class Operands:
    """A chunk's codes and digits as operands of tensor cores, while a kernel is traced.

    Codes of 8 bits are read from shared memory. Others are moved to the highest bits of bytes in
    registers, so that products are 2^(8 - bits) times as large.

    Args:
        values: 64 rows of codes of a multiple of 128 columns, or of their lowest bits: a reference
            in shared memory, and the bytes of a row.
        high: the codes' other bits, or None.
        digits: the same columns of the digits, [rows of digits, columns].
        bits: bits of a code.
    """

    def __init__(
        self, values: tuple[Any, int], high: tuple[Any, int] | None, digits: Any, bits: int
    ) -> None:
        self._values, self._digits, self._bits = values[0], digits, bits
        self._columns = 8 * digits.type.shape[0]  # of a product
        self._bytes = Stored(mgpu.utils.memref_ptr(values[0]), values[1])
        self._high = None if high is None else Stored(mgpu.utils.memref_ptr(high[0]), high[1])

    def codes(self, block: int, *, halves: bool = False) -> list[tuple[Any, int | None]]:
        """Returns a block's codes, or those of its halves, and their stride in shared memory."""
        if self._bits == 8:
            return [(self._descriptor(self._values, block), BLOCK)]
        registers = code_registers(self._bytes, self._high, block=block, bits=self._bits)
        made = operands(registers, halves=halves)
        return [(mgpu.optimization_barrier(some), None) for some in made]

    def product(self, codes: Any, stride: int | None, block: int, before: Any = None) -> Any:
        """Returns registers of a block's product, or of its sum with a product before it.

        The product is not waited for (`finished`).
        """
        digits = self._descriptor(self._digits, block)
        if before is None:
            return _first_product(codes, digits, self._columns)
        byte = ir.IntegerType.get_signless(8)
        return wgmma_m64(
            before,
            codes,
            digits,
            a_transpose=None if stride is None else False,
            b_transpose=False,
            a_k_stride=stride,
            b_k_stride=BLOCK,
            n=self._columns,
            swizzle=BLOCK,  # a product takes this many bytes of a row
            a_element_type=byte,
            b_element_type=byte,
        )

    @staticmethod
    def finished(products: list[Any]) -> list[Any]:
        """Waits for all products, and returns them as arrays [64, columns]."""
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        return [
            mgpu.optimization_barrier(  # no register is read before its product has finished
                mgpu.FragmentedArray(
                    _registers=registers,
                    _layout=fragmented_array.WGMMA_LAYOUT_ACC_32BIT,
                    _is_signed=True,
                )
            ).to_layout(fragmented_array.WGMMA_LAYOUT)
            for registers in products
        ]

    def _descriptor(self, memory: Any, block: int) -> Any:
        """Returns the descriptor of a block's 32 columns of rows in shared memory."""
        tile, place = divmod(block, SWIZZLE // BLOCK)
        own = mgpu.memref_slice(memory, (slice(None), slice(tile, tile + 1)))
        (descriptor, _), *_ = mma_utils.create_descriptor(
            *(own, SWIZZLE, (8 * own.type.shape[0], SWIZZLE)), logical_k_major=False
        )
        wide = ir.IntegerType.get_signless(64)
        at = arith.constant(wide, mma_utils.encode_addr(place * BLOCK))
        return arith.addi(descriptor, at)


def _first_product(codes: Any, digits: Any, columns: int) -> Any:
    """Returns registers of a product that is added to nothing, so that none has to be 0 before."""
    word, count = ir.IntegerType.get_signless(32), columns // 2
    given, kinds = [codes], ["l"]
    if isinstance(codes, mgpu.FragmentedArray):
        given, kinds = [llvm.bitcast(word, one) for one in codes.registers.flat], ["r"] * 4
    first = count + len(given)
    of_codes = ",".join(f"${count + nth}" for nth in range(len(given)))
    if len(given) > 1:
        of_codes = f"{{{of_codes}}}"
    of_sums = ",".join(f"${nth}" for nth in range(count))
    made = llvm.inline_asm(
        llvm.StructType.get_literal([word] * count),
        [*given, digits],
        "{ .reg .pred none; setp.ne.b32 none, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 "
        f"{{{of_sums}}}, {of_codes}, ${first}, none; }}",
        ",".join(["=r"] * count + kinds + ["l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    one = ir.VectorType.get((1,), word)
    registers = [
        vector.from_elements(one, [llvm.extractvalue(word, made, [nth])]) for nth in range(count)
    ]
    shape = fragmented_array.WGMMA_LAYOUT_ACC_32BIT.registers_shape((ROWS, columns))
    return np.array(registers, dtype=object).reshape(shape)


def block_products(
    values_s: Any, high_s: Any, digits_s: Any, blocks: Sequence[int], bits: int, *, halves: bool
) -> list[Any]:
    """Returns several blocks' products with digits, [64, rows of digits] of int32 (`Operands`).

    With `halves`, a block's first and last 16 columns have separate products.
    """
    made = plgpu.ShapeDtypeStruct((ROWS, digits_s.shape[0]), jnp.int32, layout=plgpu.Layout.WGMMA)
    given = [values_s, digits_s] + [high_s] * (high_s is not None)
    kinds = [plgpu.RefType(tiled(min(x.shape[1], SWIZZLE), 1)) for x in given]

    @plgpu.inline_mgpu(arg_types=kinds, return_type=[made] * (len(blocks) * (1 + halves)))
    def products(_, values, digits, *high):
        of_high = (high[0], high_s.shape[1]) if high else None
        chunk = Operands((values, values_s.shape[1]), of_high, digits, bits)
        loaded = [(block, *one) for block in blocks for one in chunk.codes(block, halves=halves)]
        nvvm.wgmma_fence_aligned()  # after the last register was written
        made = [chunk.product(codes, stride, block) for block, codes, stride in loaded]
        return chunk.finished(made)

    return products(*given)
