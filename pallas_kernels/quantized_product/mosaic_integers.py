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
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64
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
from jsparse.pallas_kernels.quantized_product.mosaic_shared import tiled
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
    """How rows in fixed point are arranged, as rows of digits and columns of units and sums.

    Attributes:
        padded: rows of x: 4, or a multiple of 8.
        shift: bits by which codes are larger than they mean; a unit is that much smaller.
        per_sum: numbers of a row that a sum adds; 0: there are no sums.
    """

    padded: int
    shift: int = 0
    per_sum: int = 0

    @property
    def apart(self) -> bool:
        """Whether each of four rows has a column per digit, since tensor cores take 8 columns."""
        return self.padded < 8

    @property
    def columns(self) -> int:
        """Columns of units, sums, and products."""
        return 2 * self.padded if self.apart else self.padded


def fixed_point(
    x: BFloat16[Array, "rows in"], digits: Digits
) -> tuple[
    Int8[Array, "digits in"], Float32[Array, "in_blocks columns"], Float32[Array, "n columns"]
]:
    """Returns the high digits of all rows, then the low ones, the blocks' units, and sums of x."""
    wide = x.astype(jnp.float32).reshape(len(x), -1, BLOCK)
    top = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), -1), jnp.uint32)
    exponent = jnp.maximum((top + ROUND_UP) >> 23, LEAST)
    unit = jnp.where(top >= INFINITE, NOT_A_NUMBER, (exponent - BITS) << 23)
    inverse = lax.bitcast_convert_type((254 + BITS - exponent) << 23, jnp.float32)
    integers = jnp.round(wide * inverse[..., None]).astype(jnp.int32)
    high, low = (integers + 128) >> 8, integers.astype(jnp.int8).astype(jnp.int32)
    both = jnp.concatenate([high, low]).astype(jnp.int8).reshape(-1, x.shape[1])
    units = lax.bitcast_convert_type(unit, jnp.float32).T
    parts = [256 * high, low] if digits.apart else [256 * high + low]
    of_parts = [256 * units, units] if digits.apart else [units]
    per = digits.per_sum or BLOCK
    sums = [jnp.sum(part.reshape(len(x), -1, per), -1).T for part in parts]
    sums = jnp.concatenate(sums, 1) * jnp.repeat(
        jnp.concatenate([units] * len(parts), 1), BLOCK // per, 0
    )
    return both, jnp.concatenate(of_parts, 1) * 2.0**-digits.shift, sums


def put_in_fixed_point(
    x: Any, digits_s: Any, units_s: Any, sums_s: Any, first: Any, warpgroups: int, form: Digits
) -> None:
    """Computes `fixed_point` of the columns from `first` on for which `digits_s` has room.

    Args:
        x: [rows, in] of bfloat16, in global memory.
        digits_s: [2 · padded, columns]; rows past those of x are not written.
        units_s: [columns / 32, columns of `form`]; units of blocks past the end of x become 0.
        sums_s: [columns / per_sum, columns of `form`], or None.
        first: the first column.
        warpgroups: the number of warpgroups that share the work.
        form: the arrangement.
    """
    kinds = [plgpu.RefType(), plgpu.RefType(tiled(SWIZZLE, 1)), plgpu.RefType()]
    given = [x, digits_s, units_s]
    if form.per_sum:
        kinds.append(plgpu.RefType())
        given.append(sums_s)

    @plgpu.inline_mgpu(arg_types=(*kinds, plgpu.Layout.WG_SPLAT))
    def put_all(_, x, digits, units, *others):
        sums, first = others if form.per_sum else (None, *others)
        rows, width = x.type.shape
        columns, padded = digits.type.shape[1] * SWIZZLE, form.padded
        begin, (to, at_x) = first.registers.item(), map(mgpu.utils.memref_ptr, (digits, x))
        blocks, threads = columns // BLOCK, warpgroups * THREADS

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

        def put(row, block, there, numbers):
            high, low, unit, sums_of = _in_fixed_point(numbers, form.per_sum or BLOCK)
            unit = arith.select(there, unit, constant(unit, 0.0))
            put_digits(row, block, high)
            put_digits(plus(row, padded), block, low)
            of_columns = ((1.0, row),)
            if form.apart:
                of_columns = ((256.0, row), (1.0, plus(row, padded)))
            for factor, column in of_columns:
                scaled = arith.mulf(unit, constant(unit, factor * 2.0**-form.shift))
                memref.store(scaled, units, [index(block), index(column)])
            for nth, both in enumerate(sums_of if form.per_sum else ()):
                if not form.apart:
                    both = (arith.addi(times(both[0], 256), both[1]),)
                place = index(plus(times(block, len(sums_of)), nth))
                for (factor, column), n in zip(of_columns, both, strict=True):
                    wide = arith.mulf(arith.sitofp(unit.type, n), constant(unit, factor))
                    memref.store(arith.mulf(wide, unit), sums, [place, index(column)])

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

    put_all(*given, first)


def _load_block(x: Any, at: Any) -> list[Any]:
    """Loads a block of numbers, eight at a time."""
    kind = ir.VectorType.get((8,), ir.BF16Type.get())
    places = (mgpu.utils.getelementptr(x, [plus(at, n)], kind.element_type) for n in (0, 8, 16, 24))
    return [llvm.load(kind, place, alignment=16) for place in places]


def _in_fixed_point(
    numbers: list[Any], per_sum: int
) -> tuple[list[Any], list[Any], Any, list[tuple[Any, Any]]]:
    """Returns a block's high digits, 16 and 16, its low digits, its unit, and sums of both."""
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
        signed = (arith.extsi(integers, some[-1]) for some in (high, low))
        sums.append([vector.reduction(word, vector.CombiningKind.ADD, some) for some in signed])
    if per_sum == BLOCK:
        sums = [[arith.addi(*pair) for pair in zip(*sums, strict=True)]]
    return high, low, arith.bitcast(ir.F32Type.get(), unit), sums


def _store(value: Any, pointer: Any, byte: Any) -> None:
    """Stores 16 bytes."""
    place = mgpu.utils.getelementptr(pointer, [byte], ir.IntegerType.get_signless(8))
    llvm.store(value, place, alignment=16)


def block_products(
    values_s: Any, high_s: Any, digits_s: Any, blocks: Sequence[int], bits: int, *, halves: bool
) -> list[Any]:
    """Returns several blocks' products of 64 rows of codes with digits, [64, digits] of int32.

    Codes of 8 bits are read by the tensor cores. Others are placed in the highest bits of bytes in
    registers, so that products are 2^(8 - bits) times as large.

    Args:
        values_s: 64 rows of 128 columns; of smaller codes, of all columns of a chunk.
        high_s: the codes' other bits, or None.
        digits_s: 128 columns of the digits.
        blocks: indices of blocks of `values_s`.
        bits: bits of a code.
        halves: whether a block's first and last 16 columns have separate products.
    """
    rows, digits = values_s.shape[0], digits_s.shape[0]
    made = plgpu.ShapeDtypeStruct((rows, digits), jnp.int32, layout=plgpu.Layout.WGMMA)
    given = [values_s, digits_s] + [high_s] * (high_s is not None)
    kinds = [plgpu.RefType(tiled(x.shape[1], 1)) for x in given]
    kinds[1] = plgpu.RefType(tiled(SWIZZLE, 1))
    number = len(blocks) * (1 + halves)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=[made] * number)
    def products(_, values, digits_ref, *high):
        word, wide, byte = (ir.IntegerType.get_signless(bits) for bits in (32, 64, 8))
        turned = mgpu.memref_transpose(digits_ref, (1, 0, 3, 2))
        (right, _), *_ = mma_utils.create_descriptor(
            *(turned, SWIZZLE, (SWIZZLE, digits)), logical_k_major=True
        )

        def moved(descriptor, nbytes):
            return arith.addi(descriptor, arith.constant(wide, mma_utils.encode_addr(nbytes)))

        pairs: list[tuple[int, Any, int | None]] = []  # block, codes, their stride
        if bits == 8:
            (left, _), *_ = mma_utils.create_descriptor(
                *(values, SWIZZLE, (rows, SWIZZLE)), logical_k_major=False
            )
            pairs = [(block, moved(left, block * BLOCK), BLOCK) for block in blocks]
        else:
            stored = [
                Stored(mgpu.utils.memref_ptr(ref), x.shape[1])
                for ref, x in ((values, values_s), *((ref, high_s) for ref in high))
            ]
            for block in blocks:
                codes = code_registers(stored[0], *stored[1:] or [None], block=block, bits=bits)
                pairs += [(block, wgmma_fence(x), None) for x in operands(codes, halves=halves)]
        sums = []
        for block, codes, stride in pairs:
            acc = mgpu.WGMMAAccumulator.zero(rows, digits, word, is_signed=True)
            registers = wgmma_m64(
                acc._value.registers,
                codes,
                moved(right, block % (SWIZZLE // BLOCK) * BLOCK),
                a_transpose=None if stride is None else False,
                b_transpose=False,
                a_k_stride=stride,
                b_k_stride=BLOCK,
                n=digits,
                swizzle=BLOCK,  # a product takes this many bytes of a row
                a_element_type=byte,
                b_element_type=byte,
            )
            sums.append((acc, registers))
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        return [
            mgpu.optimization_barrier(  # no register is read before its product has finished
                mgpu.FragmentedArray(
                    _registers=registers, _layout=acc._value.layout, _is_signed=True
                )
            ).to_layout(acc._original_layout)
            for acc, registers in sums
        ]

    return products(*given)
