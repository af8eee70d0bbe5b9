# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Implements `api.quantized_product` with Mosaic GPU for at most 32 rows, for Hopper.

It is one persistent launch. A unit of work is 64 rows of the matrix over a part of its columns. One
warpgroup copies chunks of columns by TMA, as far ahead as shared memory allows. The others convert
x to fixed point while the first chunks are in flight, and then take chunks in turn. Tensor cores
multiply the integers of both, group by group of 16 or 32 columns, without rounding. The sums are
multiplied by the group's scale and the block's unit and added in float32. Offsets are multiplied by
sums of x. From 5 rows on, the bits of a row of x do not depend on the other rows, up to 16 or 32 in
all, but differ from those of other backends.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from jsparse.pallas_kernels.quantized_product import mosaic_emulation as emulation
from jsparse.pallas_kernels.quantized_product.mosaic_diagonal import add_chunk
from jsparse.pallas_kernels.quantized_product.mosaic_diagonal import store as store_diagonal
from jsparse.pallas_kernels.quantized_product.mosaic_few_problem import (
    Problem,
    best_parts,
    best_turns,
    chunk_columns,
    group_of,
    most_stages,
)
from jsparse.pallas_kernels.quantized_product.mosaic_integers import (
    SWIZZLE,
    block_products,
    put_in_fixed_point,
)
from jsparse.pallas_kernels.quantized_product.mosaic_shared import (
    BLOCKS_OF_H100,
    ROWS,
    store_registers,
    tiled,
)
from jsparse.pallas_kernels.weight_blocks import BLOCK, SUPER, Blocks, form_of, out_axis


def few_rows(
    x: Float[Array, "rows in"],
    matrix: Blocks,
    *,
    columns: int | None = None,
    stages: int | None = None,
    turns: int | None = None,
    parts: int | None = None,
    blocks: int = BLOCKS_OF_H100,
    interpret: bool = False,
) -> Float32[Array, "parts rows out"]:
    """Multiplies at most 32 rows in one launch; the caller adds the returned parts.

    The integers override the fastest measured values. `interpret` runs the kernel on any machine,
    slowly, for tests.
    """
    (rows, width), out, form = x.shape, len(matrix["values"]), form_of(matrix)
    group = group_of(rows, form)
    padded = group if group < 8 else -(-rows // 8) * 8
    if columns is None:
        columns = chunk_columns(form, group)
    if turns is None:
        turns = best_turns(form, group)
    if parts is None:
        parts = best_parts(out, width, columns, group)
    chunks = -(-width // (columns * parts))
    if stages is None:
        stages = most_stages(form, padded, columns, chunks, turns)
    assert stages % turns == 0
    assert columns % form.multiple == 0
    problem = Problem(
        *(form, rows, padded, out, width, columns, stages, turns, parts),
        blocks=min(blocks - blocks % parts, out // ROWS * parts),
        interpret=interpret,
    )
    return _kernel(problem)(x, *(matrix[name] for name in problem.arrays))


class Refs(NamedTuple):
    """A launch's arrays, and a program's shared memory and barriers.

    One warpgroup fills a slot and another frees it. A slot's nth use is its barriers' nth phase.
    """

    x: Any  # [rows, in]
    matrix: dict[str, Any]  # as in `Blocks`
    out: Any  # [parts, rows, out]: sums of each part
    digits_s: Any  # [rows of digits, part_columns]
    units_s: Any  # [part_columns / 32, padded]: units of x
    sums_of_x_s: Any  # [part_columns / segment, padded], or a placeholder
    matrix_s: dict[str, Any]  # [stages, a chunk's array]
    sums_s: Any  # [turns - 1, ROWS, columns]: sums of all warpgroups but the first
    x_full: Any  # all have converted their share of x to fixed point
    full: Any  # [stages]: a chunk has arrived
    free: Any  # [stages]: it has been used
    sums_full: Any  # all but the first have stored their sums
    sums_free: Any  # the first has added them to its own

    @classmethod
    def named(cls, names: Sequence[str], refs: Sequence[Any]) -> "Refs":
        """Returns the references of a launch, whose order is that of the fields."""
        x, *rest = refs
        count = len(names)
        matrix, rest = dict(zip(names, rest, strict=False)), rest[count:]
        (out, digits, units, sums), rest = rest[:4], rest[4:]
        return cls(
            *(x, matrix, out, digits, units, sums),
            dict(zip(names, rest, strict=False)),
            *rest[count:],
        )


@cache
def _kernel(p: Problem):
    """Builds the launch, which returns each part's sums [parts, rows, out]."""

    def body(*refs):
        named, warpgroup = Refs.named(list(p.arrays), refs), lax.axis_index("warpgroup")

        @pl.when(warpgroup < p.turns)
        def _():
            _multiply(p, named, warpgroup)

        @pl.when(warpgroup == p.turns)
        def _():
            _copy(p, named)

    body.__name__ = "quantized_product"
    sums = (p.part_columns // p.digits.segment, p.padded) if p.form.mins else (1, 8)
    codes = ("values", "high")

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.parts, p.rows, p.out), jnp.float32),
        scratch_types=[
            plgpu.SMEM((p.digits.rows, p.part_columns), jnp.int8, transforms=tiled(SWIZZLE, 1)),
            plgpu.SMEM((p.part_columns // BLOCK, p.padded), jnp.float32),
            plgpu.SMEM(sums, jnp.float32),
            *(
                plgpu.SMEM(
                    (p.stages, *shape),
                    dtype,
                    transforms=tiled(min(shape[1], SWIZZLE), 1) if name in codes else (),
                )
                for name, (shape, dtype) in p.arrays.items()
            ),
            plgpu.SMEM((p.others, ROWS, p.digits.columns), jnp.float32),
            plgpu.Barrier(num_arrivals=p.turns),
            plgpu.Barrier(num_arrivals=len(p.arrays), num_barriers=p.stages),
            plgpu.Barrier(num_barriers=p.stages),
            plgpu.Barrier(num_arrivals=p.others),
            plgpu.Barrier(),
        ],
        grid=(p.blocks,),
        grid_names=("block",),
        num_threads=p.turns + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if p.interpret else None,
    )


def _share(p: Problem) -> tuple[Any, Any]:
    """Returns the part of all units of a program, and the number of its units."""
    block = lax.axis_index("block")
    return lax.rem(block, p.parts), lax.div(p.units - block + p.blocks - 1, p.blocks)


def _rows_of(p: Problem, unit: Any) -> Any:
    """Returns the matrix rows of a program's nth unit."""
    tile = lax.div(lax.axis_index("block") + unit * p.blocks, p.parts)
    return pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)


def _multiply(p: Problem, r: Refs, warpgroup: Any) -> None:
    """Multiplies this warpgroup's chunks; the first warpgroup stores the sums of all."""
    part, units = _share(p)
    put = emulation.put_in_fixed_point if p.interpret else put_in_fixed_point
    first_column = part * p.part_columns
    put(r.x, r.digits_s, r.units_s, r.sums_of_x_s, first_column, p.turns, p.digits)
    if not p.interpret:
        plgpu.commit_smem()
    plgpu.barrier_arrive(r.x_full)
    plgpu.barrier_wait(r.x_full)

    def add_chunk(unit, at, acc):
        slot = lax.rem(unit * p.chunks + at, p.stages)
        plgpu.barrier_wait(r.full.at[slot])
        chunk = {name: ref.at[slot] for name, ref in r.matrix_s.items()}
        add = _add_diagonal if p.digits.diagonal else _add
        acc = add(p, r, chunk, at * p.columns, acc)
        plgpu.barrier_arrive(r.free.at[slot])
        return acc

    def unit(nth, none):
        # takes every p.turns-th of all the program's chunks, so that a slot of shared memory always
        # belongs to the same warpgroup, which counts the phases of its barriers
        first = lax.rem(warpgroup + (p.turns - 1) * nth * p.chunks, p.turns)
        own = lax.div(p.chunks - first + p.turns - 1, p.turns)
        acc = lax.fori_loop(
            0, own, lambda i, acc: add_chunk(nth, first + i * p.turns, acc), _zeros(p)
        )

        @pl.when(warpgroup > 0)
        def _():
            @pl.when(nth > 0)
            def _():
                plgpu.barrier_wait(r.sums_free)

            r.sums_s[warpgroup - 1] = acc
            plgpu.barrier_arrive(r.sums_full)

        @pl.when(warpgroup == 0)
        def _():
            whole = acc
            if p.turns > 1:
                plgpu.barrier_wait(r.sums_full)
            for other in range(p.turns - 1):
                whole = whole + _load(p, r.sums_s.at[other], plgpu.Layout.WGMMA)
            if p.turns > 1:
                plgpu.barrier_arrive(r.sums_free)
            _store(p, r.out.at[part, :, _rows_of(p, nth)], whole)

        return none

    lax.fori_loop(0, units, unit, jnp.int32(0))

    @pl.when(warpgroup > 0)
    def _():
        plgpu.barrier_wait(r.sums_free)


def _zeros(p: Problem) -> Any:
    return plgpu.layout_cast(
        jnp.full((ROWS, p.digits.columns), 0.0, jnp.float32), plgpu.Layout.WGMMA
    )


def _add(p: Problem, r: Refs, chunk: dict[str, Any], first: Any, acc: Any) -> Any:
    """Adds a chunk's products, whose columns begin at `first`, to the sums [ROWS, columns of x].

    With factors of scales and mins, which a chunk has one of, the sums of their products come
    first.
    """
    form, shape = p.form, (ROWS, p.digits.columns)
    outer, offsets = acc, None
    if form.supers:
        assert p.columns == SUPER
        acc, offsets = _zeros(p), _zeros(p) if form.mins else None

    def of_rows(name: str, at: int) -> Any:
        numbers = _load(p, chunk[name].at[at], plgpu.Layout.WGMMA.reduce(1))
        return lax.broadcast_in_dim(numbers.astype(jnp.float32), shape, [0])

    def of_columns(ref: Any, at: Any) -> Any:
        numbers = _load(p, ref.at[at], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(numbers, shape, [1])

    for block, product, part in _products(p, r, chunk, first):
        # the product of a block, or of its first or last half
        at = (block * BLOCK + part * form.group) // form.group
        product = product[:, : p.padded] * 256 + product[:, p.padded :]
        column = first // BLOCK + block
        terms, unit = product.astype(jnp.float32), of_columns(r.units_s, column)
        scale = of_rows("scales", at)
        if form.mins:
            terms = terms * unit
            sums = of_columns(r.sums_of_x_s, column * (1 + p.halves) + part)
            mins = of_rows("mins", at)
            if form.supers:
                terms = terms + sums
                offsets = offsets + mins * sums
            else:
                terms = terms + (form.half - mins) * sums
            acc = acc + terms * scale
        else:  # a product with the unit alone may overflow
            acc = acc + terms * (scale * unit)
    if not form.supers:
        return acc
    outer = outer + acc * of_rows("super_scales", 0)
    return outer if offsets is None else outer - offsets * of_rows("super_mins", 0) / form.half


def _add_diagonal(p: Problem, r: Refs, chunk: dict[str, Any], first: Any, acc: Any) -> Any:
    """Adds a chunk's products with rows of x that are diagonal."""
    add = emulation.add_chunk if p.interpret else add_chunk
    column = pl.multiple_of(first, p.columns)
    of_x = r.digits_s.at[:, pl.ds(column, p.columns)], r.units_s, r.sums_of_x_s
    return add(p.form, p.digits, chunk, of_x, column, acc)


def _products(p: Problem, r: Refs, chunk: dict[str, Any], first: Any) -> Iterator[Any]:
    """Yields block, product, and half of the block (0 if whole), for all of a chunk."""
    multiply = emulation.block_products if p.interpret else block_products
    column = pl.multiple_of(first, p.columns)
    digits, count = r.digits_s.at[:, pl.ds(column, p.columns)], p.columns // BLOCK
    for start in range(0, count, p.at_once):
        some = range(start, start + p.at_once)
        made = multiply(
            *(chunk["values"], chunk.get("high"), digits, some, p.form.bits), halves=p.halves
        )
        places = itertools.product(some, range(1 + p.halves))
        for (block, half), product in zip(places, made, strict=True):
            yield block, product, half


def _copy(p: Problem, r: Refs) -> None:
    """Copies chunk after chunk into free slots.

    Rows and columns past the end become 0, in codes and in scales.
    """
    part, units = _share(p)
    sent = units * p.chunks

    def send(nth, none):
        slot = lax.rem(nth, p.stages)

        @pl.when(nth >= p.stages)
        def _():
            plgpu.barrier_wait(r.free.at[slot])

        rows, chunk = _rows_of(p, lax.div(nth, p.chunks)), lax.rem(nth, p.chunks)
        at = part * p.chunks + chunk
        for name, (shape, _) in p.arrays.items():
            axis = 1 - out_axis(name)  # that of the columns
            first = at * shape[axis]
            own = pl.ds(pl.multiple_of(first, shape[axis]), shape[axis])
            place = (rows, own) if axis else (own, rows)
            source, target = r.matrix[name].at[place], r.matrix_s[name].at[slot]
            plgpu.copy_gmem_to_smem(source, target, r.full.at[slot])
        return none

    def drain(nth, none):
        plgpu.barrier_wait(r.free.at[lax.rem(nth, p.stages)])
        return none

    lax.fori_loop(0, sent, send, jnp.int32(0))
    lax.fori_loop(jnp.maximum(sent - p.stages, 0), sent, drain, jnp.int32(0))


def _load(p: Problem, ref: Any, layout: Any) -> Any:
    return ref[...] if p.interpret else plgpu.load(ref, layout=layout)


def _store(p: Problem, out: Any, sums: Any) -> None:  # [rows, ROWS], [ROWS, columns]
    """Stores the actual rows of x."""
    if p.interpret:
        emulation.store(p.digits, out, sums)
    elif p.digits.diagonal:
        store_diagonal(p.padded, out, sums)
    else:
        store_registers(out, sums)
