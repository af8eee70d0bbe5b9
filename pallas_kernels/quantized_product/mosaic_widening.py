# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Widens a matrix's blocks to bfloat16 in registers, for tensor cores, in Mosaic GPU.

Tensor cores wait for a good part of this, so every instruction counts. Two numbers take a load; an
instruction that flips the signs; two that put each number n into the mantissa of a float32 with the
exponent of 2^15, which gives 2^15 + 128 + n; two fused multiply-adds; and one that rounds. A
multiply-add subtracts scale · (2^15 + 128) from scale · (2^15 + 128 + n). A scale has 11 bits, so
the former is exact, and the rounded number is scale · n.
"""

from typing import Any

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
    times,
)
from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS, tiled
from jsparse.pallas_kernels.weight_blocks import BLOCK

LINES, SEGMENT = 8, 16  # rows of a tile of shared memory; bytes that are swizzled together
SIGNS = 0x8080  # sign bits of two bytes
EXPONENT, OFFSET = 0x47000000, 2.0**15 + 128
SELECTORS = (0x7604, 0x7614)  # of prmt: the first or second byte, and the exponent's bytes


def widened(values_s: Any, scales_s: Any) -> list[Any]:
    """Returns tensor core operands, [64, 32] per block.

    Args:
        values_s: 64 rows of bytes, [64, columns].
        scales_s: [columns / 32, 64].
    """
    width = values_s.shape[1]
    made = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled(width, 1)), plgpu.RefType()),
        return_type=[made] * (width // BLOCK),
    )
    def widen(_, values, scales):
        layout = made.layout.to_mgpu()
        row, column = position()
        (_, line), memory = divided(row, LINES), mgpu.utils.memref_ptr(values)
        begin = arith.addi(times(row, width), column)
        swizzle = times(divided(line, LINES * SEGMENT // width)[0], SEGMENT)

        def two(segment, half, behind):
            at = arith.addi(begin, arith.xori(swizzle, constant(swizzle, segment * SEGMENT)))
            return _load_two(memory, plus(at, half * LINES * width + behind))

        arrays = []
        for block in range(width // BLOCK):
            own = [_scale(scales, block, plus(row, LINES * half)) for half in range(2)]
            registers = [
                _products(two(segment, half, behind), *own[half])
                for segment in range(block * BLOCK // SEGMENT, (block + 1) * BLOCK // SEGMENT)
                for behind in (0, SEGMENT // 2)
                for half in range(2)
            ]
            shaped = np.array(registers, dtype=object).reshape(layout.registers_shape(made.shape))
            arrays.append(mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None))
        return arrays

    return widen(values_s, scales_s)


def _load_two(memory: Any, at: Any) -> Any:
    """Loads two bytes into a word."""
    byte, two, word = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
    place = mgpu.utils.getelementptr(memory, [at], byte)
    return arith.extui(word, llvm.load(two, place, alignment=2))


def _scale(scales: Any, block: int, row: Any) -> tuple[Any, Any]:
    """Returns a row's scale, and the offset that is added to its products."""
    place = [arith.constant(ir.IndexType.get(), block), index(row)]
    scale = arith.extf(ir.F32Type.get(), memref.load(scales, place))
    return scale, arith.mulf(scale, constant(scale, -OFFSET))


def _products(two: Any, scale: Any, offset: Any) -> Any:
    """Returns two integers times their scale, rounded to bfloat16."""
    floats, rounded = (
        ir.VectorType.get((2,), kind) for kind in (ir.F32Type.get(), ir.BF16Type.get())
    )
    two, exponent = arith.xori(two, constant(two, SIGNS)), constant(two, EXPONENT)
    products = []
    for selector in SELECTORS:
        number = mgpu.utils.prmt(two, exponent, constant(two, selector))
        products.append(math.fma(arith.bitcast(ir.F32Type.get(), number), scale, offset))
    return arith.truncf(rounded, vector.from_elements(floats, products))
