# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Converts rows to fixed point and multiplies integers in tensor cores, in Mosaic GPU.

A block of 32 numbers of a row becomes 16-bit integers and their unit, a power of two that fits the
largest of them. Tensor cores multiply bytes, so each integer is 256 · high + low, with its two
digits in two rows. If all eight bits of the bfloat16 mantissa of a block's largest number are set,
its unit is doubled, because 128 would not fit in the high digit.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
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


def fixed_point(
    x: BFloat16[Array, "rows in"],
) -> tuple[Int8[Array, "2*rows in"], Float32[Array, "in_blocks rows"]]:
    """Returns the high digits of all rows, then the low ones, and the blocks' units."""
    wide = x.astype(jnp.float32).reshape(len(x), -1, BLOCK)
    top = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), -1), jnp.uint32)
    exponent = jnp.maximum((top + ROUND_UP) >> 23, LEAST)
    unit = jnp.where(top >= INFINITE, NOT_A_NUMBER, (exponent - BITS) << 23)
    inverse = lax.bitcast_convert_type((254 + BITS - exponent) << 23, jnp.float32)
    integers = lax.bitcast_convert_type(wide * inverse[..., None] + WHOLE, jnp.int32)
    digits = jnp.concatenate([(integers + 128) >> 8, integers]).astype(jnp.int8)
    return digits.reshape(-1, x.shape[1]), lax.bitcast_convert_type(unit, jnp.float32).T


def put_in_fixed_point(x: Any, digits_s: Any, units_s: Any, first: Any, warpgroups: int) -> None:
    """Computes `fixed_point` of the columns from `first` on for which `digits_s` has room.

    Args:
        x: [rows, in] of bfloat16, in global memory.
        digits_s: [2 · padded, columns]; rows past those of x are not written.
        units_s: [columns / 32, padded]; units of blocks past the end of x become 0.
        first: the first column.
        warpgroups: the number of warpgroups that share the work.
    """
    arguments = (
        plgpu.RefType(),
        plgpu.RefType(tiled(SWIZZLE, 1)),
        plgpu.RefType(),
        plgpu.Layout.WG_SPLAT,
    )

    @plgpu.inline_mgpu(arg_types=arguments)
    def put_all(_, x, digits, units, first):
        rows, width = x.type.shape
        columns, padded = digits.type.shape[1] * SWIZZLE, digits.type.shape[0] * 4
        begin, (to, at_x) = first.registers.item(), map(mgpu.utils.memref_ptr, (digits, x))
        blocks, threads = columns // BLOCK, warpgroups * THREADS

        def load(nth):
            row, block = divided(nth, blocks)
            column = arith.addi(begin, times(block, BLOCK))
            # columns past the end count as 0, whatever they contain
            there = below(column, width)
            column = arith.minui(column, constant(column, width - BLOCK))
            return row, block, there, _load_block(at_x, arith.addi(times(row, width), column))

        def put(row, block, there, numbers):
            high, low, unit = _in_fixed_point(numbers)
            of_row, line = divided(row, 8)
            of_block, start = divided(times(block, BLOCK), SWIZZLE)
            tile = arith.addi(times(of_row, columns // SWIZZLE), of_block)
            place = arith.addi(times(tile, TILE), times(line, SWIZZLE))
            for half in range(2):  # 16 bytes are swizzled together
                swizzled = arith.xori(plus(start, 16 * half), times(line, 16))
                at = arith.addi(place, swizzled)
                _store(high[half], to, at)
                _store(low[half], to, plus(at, padded * columns))
            unit = arith.select(there, unit, constant(unit, 0.0))
            memref.store(unit, units, [index(block), index(row)])

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

    put_all(x, digits_s, units_s, first)


def _load_block(x: Any, at: Any) -> list[Any]:
    """Loads a block of numbers, eight at a time."""
    kind = ir.VectorType.get((8,), ir.BF16Type.get())
    places = (mgpu.utils.getelementptr(x, [plus(at, n)], kind.element_type) for n in (0, 8, 16, 24))
    return [llvm.load(kind, place, alignment=16) for place in places]


def _in_fixed_point(numbers: list[Any]) -> tuple[list[Any], list[Any], Any]:
    """Returns a block's high digits, 16 and 16, its low digits, and its unit."""
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
    high, low = [], []
    for half in halves:
        moved = arith.addf(arith.mulf(half, inverse), mgpu.c(WHOLE, floats))
        whole = arith.bitcast(integers, moved)
        above = arith.shrui(arith.addi(whole, mgpu.c(128, integers)), mgpu.c(8, integers))
        high.append(arith.trunci(bytes_, above))
        low.append(arith.trunci(bytes_, whole))
    return high, low, arith.bitcast(ir.F32Type.get(), unit)


def _store(value: Any, pointer: Any, byte: Any) -> None:
    """Stores 16 bytes."""
    place = mgpu.utils.getelementptr(pointer, [byte], ir.IntegerType.get_signless(8))
    llvm.store(value, place, alignment=16)


def block_products(values_s: Any, digits_s: Any, blocks: Sequence[int]) -> list[Any]:
    """Returns several blocks' products of 64 rows of bytes with digits, [64, digits] of int32.

    Args:
        values_s: rows of 128 columns.
        digits_s: the same columns of the digits.
        blocks: indices among its four blocks.
    """
    rows, digits = values_s.shape[0], digits_s.shape[0]
    kind = plgpu.RefType(tiled(SWIZZLE, 1))
    made = plgpu.ShapeDtypeStruct((rows, digits), jnp.int32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(kind, kind), return_type=[made] * len(blocks))
    def products(_, values, digits_ref):
        word, wide, byte = (ir.IntegerType.get_signless(bits) for bits in (32, 64, 8))
        (left, _), *_ = mma_utils.create_descriptor(
            *(values, SWIZZLE, (rows, SWIZZLE)), logical_k_major=False
        )
        turned = mgpu.memref_transpose(digits_ref, (1, 0, 3, 2))
        (right, _), *_ = mma_utils.create_descriptor(
            *(turned, SWIZZLE, (SWIZZLE, digits)), logical_k_major=True
        )

        def moved(descriptor, nbytes):
            return arith.addi(descriptor, arith.constant(wide, mma_utils.encode_addr(nbytes)))

        sums = []
        for block in blocks:
            acc = mgpu.WGMMAAccumulator.zero(rows, digits, word, is_signed=True)
            registers = wgmma_m64(
                acc._value.registers,
                moved(left, block * BLOCK),
                moved(right, block * BLOCK),
                a_transpose=False,
                b_transpose=False,
                a_k_stride=BLOCK,
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

    return products(values_s, digits_s)
