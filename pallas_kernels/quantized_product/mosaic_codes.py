# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Loads codes of 4, 5 and 6 bits into registers as bytes, for tensor cores, in Mosaic GPU.

A thread's four registers of a product of 64 by 32 bytes have four columns of two rows each, 16
columns apart (`jsparse.pallas_kernels.mosaic_registers`). A word of `values` has the lowest bits of
both registers of a row (jsparse.pallas_kernels.weight_blocks). Codes are moved to the highest bits
of their bytes, so that their sign is that of the byte.
"""

from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jsparse.pallas_kernels.mosaic_registers import constant, divided, plus, position, times
from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS
from jsparse.pallas_kernels.weight_blocks import BLOCK

LINES, SEGMENT = 8, 16  # rows of a tile of shared memory; bytes that are swizzled together
LAYOUT = fragmented_array.WGMMA_LAYOUT_8BIT


class Stored(NamedTuple):
    """Rows of bytes in shared memory, swizzled over their width."""

    memory: Any
    width: int

    def load(self, row: Any, at: int, beyond: Any = None) -> Any:
        """Loads the word of a row at byte `at`, or `beyond` bytes further in the same segment."""
        segment, within = divmod(at, SEGMENT)
        swizzle = divided(divided(row, LINES)[1], LINES * SEGMENT // self.width)[0]
        place = times(arith.xori(swizzle, constant(swizzle, segment)), SEGMENT)
        place = plus(arith.addi(times(row, self.width), place), within)
        if beyond is not None:
            place = arith.addi(place, beyond)
        byte, word = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        return llvm.load(word, mgpu.utils.getelementptr(self.memory, [place], byte), alignment=4)


def code_registers(values: Stored, high: Stored | None, *, block: int, bits: int) -> list[Any]:
    """Returns a thread's bytes of a block: its first columns of two rows, then its last ones.

    Args:
        values: 64 rows of the lowest bits.
        high: the other bits; None for codes of 4 bits.
        block: the index of the block.
        bits: bits of a code.
    """
    row, column = position()  # the column is twice the index of a thread among four
    unused, beyond = 8 - bits, times(column, 2)
    low, above = 0x0F << unused, 256 - (16 << unused)  # the bits of a byte
    firsts, lasts = [], []
    for half in range(2):
        own = plus(row, LINES * half)
        word = values.load(own, SEGMENT * block, beyond)
        both = [_masked(_shifted(word, by), low) for by in (unused, unused - 4)]
        if high is not None:
            nbytes = 4 * (bits - 4)  # of a block
            others = [high.load(own, nbytes * block + at) for at in range(0, nbytes, 4)]
            if bits == 5:  # the bits of the last columns follow those of the first
                others.append(_shifted(others[0], -1))
            left = arith.subi(constant(column, 12 - bits), column)
            moved = [_masked(arith.shli(other, left), above) for other in others]
            both = [arith.ori(*pair) for pair in zip(both, moved, strict=True)]
        firsts.append(both[0])
        lasts.append(both[1])
    return [*firsts, *lasts]


def operands(registers: list[Any], *, halves: bool) -> list[Any]:
    """Returns operands of tensor cores: a block, or its first and its last 16 columns."""
    if not halves:
        return [_operand(registers)]
    zero = [constant(registers[0], 0)] * 2
    return [_operand(registers[:2] + zero), _operand(zero + registers[2:])]


def _operand(registers: list[Any]) -> Any:
    four = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
    made = [llvm.bitcast(four, register) for register in registers]
    shaped = np.array(made, dtype=object).reshape(LAYOUT.registers_shape((ROWS, BLOCK)))
    return mgpu.FragmentedArray(_registers=shaped, _layout=LAYOUT, _is_signed=True)


def _shifted(word: Any, bits: int) -> Any:
    """Returns a word moved left, or right if `bits` is negative."""
    if bits == 0:
        return word
    amount = constant(word, abs(bits))
    return arith.shli(word, amount) if bits > 0 else arith.shrui(word, amount)


def _masked(word: Any, byte: int) -> Any:
    """Returns some bits of each byte of a word."""
    mask = byte * 0x01010101
    return arith.andi(word, constant(word, mask - (mask >> 31 << 32)))
