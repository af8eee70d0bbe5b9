# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Multiplies one, two or four rows by a chunk of a matrix in blocks, in Mosaic GPU.

Rows in fixed point are diagonal (`mosaic_integers.Digits`): a product [64, 8] has, in columns
2 (padded · class + row) and the next, the two digits of a row's product with the segments of a
class. A thread has both digits of two rows of the matrix, so that it multiplies two sums by their
scales for several segments of columns, where it would have to multiply two per segment.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, memref, nvvm, vector

from jsparse.pallas_kernels.mosaic_registers import (
    below,
    constant,
    divided,
    index,
    plus,
    position,
    times,
)
from jsparse.pallas_kernels.quantized_product.mosaic_integers import SWIZZLE, Digits, Operands
from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS, tiled
from jsparse.pallas_kernels.weight_blocks import BLOCK, Form

COLUMNS = 8


def add_chunk(
    form: Form, digits: Digits, chunk: dict[str, Any], x: tuple[Any, Any, Any], first: Any, acc: Any
) -> Any:
    """Returns sums [64, 8] plus a chunk's products; the odd columns are unused.

    Args:
        form: the format of the matrix.
        digits: the arrangement of x.
        chunk: the matrix's arrays in shared memory.
        x: digits, units and sums of x in shared memory.
        first: the chunk's first column, in x.
        acc: the sums before.
    """
    columns = chunk["values"].shape[1] * (1 if form.bits == 8 else 2)
    digits_s, units_s, sums_s = x
    names, codes = list(chunk), ("values", "high")
    kinds = [
        plgpu.RefType(tiled(min(chunk[name].shape[1], SWIZZLE), 1) if name in codes else ())
        for name in names
    ]
    widths = {name: chunk[name].shape[1] for name in names}
    of_x = plgpu.RefType(tiled(SWIZZLE, 1)), plgpu.RefType(), plgpu.RefType()
    made = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT, *of_x, *kinds), return_type=made
    )
    def add(_, acc, first, digits_ref, units, sums, *matrix):
        refs = dict(zip(names, matrix, strict=True))
        row, column = position()
        of_class, own = divided(divided(column, 2)[0], digits.padded)
        first_segment = divided(first.registers.item(), digits.segment)[0]
        rows = [plus(row, 8 * half) for half in range(2)]
        products = _products(form, digits, columns, refs, widths, digits_ref)

        def of_row(name, at):
            return [_float(memref.load(refs[name], [index(at), index(one)])) for one in rows]

        kept = [vector.extract(pair, [], [0]) for pair in acc.registers.flat]
        zero = constant(kept[0], 0.0)
        inner, offsets = ([zero] * 2 if form.supers else kept), [zero] * 2
        for nth, product in enumerate(products):
            segment = plus(of_class, nth * digits.diagonal)
            place = arith.addi(first_segment, segment)
            block = divided(place, BLOCK // digits.segment)[0]
            unit = memref.load(units, [index(block), index(own)])
            at = divided(segment, form.group // digits.segment)[0]
            scales = of_row("scales", at)
            terms = []
            for pair in product.registers.flat:
                high, low = (vector.extract(pair, [], [one]) for one in range(2))
                terms.append(arith.sitofp(zero.type, arith.addi(times(high, 256), low)))
            if form.mins:
                terms = [arith.mulf(one, unit) for one in terms]
                of_sum = memref.load(sums, [index(place), index(own)])
                mins, both = of_row("mins", at), [of_sum] * 2
                if form.supers:
                    offsets = _fused(mins, both, offsets)
                    terms = [arith.addf(one, of_sum) for one in terms]
                else:
                    half = constant(zero, float(form.half))
                    terms = _fused([arith.subf(half, m) for m in mins], both, terms)
            else:  # a product with the unit alone may overflow
                scales = [arith.mulf(one, unit) for one in scales]
            inner = _fused(scales, terms, inner)
        if form.supers:
            first_row = constant(row, 0)
            inner = _fused(of_row("super_scales", first_row), inner, kept)
            if form.mins:
                share = constant(zero, -1 / form.half)
                factors = [arith.mulf(one, share) for one in of_row("super_mins", first_row)]
                inner = _fused(factors, offsets, inner)
        pairs = [vector.from_elements(acc.registers.flat[0].type, [one, zero]) for one in inner]
        registers = np.array(pairs, dtype=object).reshape(acc.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return add(acc, first, digits_s, units_s, sums_s, *(chunk[name] for name in names))


def _products(
    form: Form,
    digits: Digits,
    columns: int,
    refs: dict[str, Any],
    widths: dict[str, int],
    digits_ref: Any,
) -> list[Any]:
    """Returns a chunk's products [64, 8] of int32, each of `digits.diagonal` segments."""
    high = (refs["high"], widths["high"]) if "high" in refs else None
    chunk = Operands((refs["values"], widths["values"]), high, digits_ref, form.bits)
    size = digits.diagonal * digits.segment
    loaded = [chunk.codes(block)[0] for block in range(columns // BLOCK)]
    nvvm.wgmma_fence_aligned()  # after the last register was written
    made = []
    for begin in range(0, columns, size):
        registers = None
        for block in range(begin // BLOCK, -(-(begin + size) // BLOCK)):
            registers = chunk.product(*loaded[block], block, registers)
        made.append(registers)
    return chunk.finished(made)


def _fused(left: Iterable[Any], right: Iterable[Any], added: Iterable[Any]) -> list[Any]:
    """Returns left · right + added."""
    return [math.fma(*one) for one in zip(left, right, added, strict=True)]


def _float(number: Any) -> Any:
    """Returns a number as float32."""
    wide = ir.F32Type.get()
    if isinstance(number.type, ir.F32Type):
        return number
    if not isinstance(number.type, ir.IntegerType):
        return arith.extf(wide, number)
    return arith.sitofp(wide, number)


def store(padded: int, out: Any, sums: Any) -> None:
    """Adds the classes' sums of each row, and stores them as rows of x, [rows, 64]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def put(_, out, sums):
        row, column = position()
        four = divided(column, 2)[0]
        for half, pair in enumerate(sums.registers.flat):
            number = vector.extract(pair, [], [0])
            distance = padded
            while distance < 4:
                number = arith.addf(number, mgpu.utils.shfl_bfly(number, distance))
                distance *= 2
            with mgpu.when(below(four, min(out.type.shape[0], padded))):
                memref.store(number, out, [index(four), index(plus(row, 8 * half))])

    put(out, sums)
