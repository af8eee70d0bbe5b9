# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Implements `api.quantized_product` with Mosaic GPU for at most 32 rows, for Hopper.

It is one persistent launch. A unit of work is 64 rows of the matrix over a part of its columns. One
warpgroup copies chunks of columns by TMA, as far ahead as shared memory allows. The others convert
x to fixed point while the first chunks are in flight, and then take chunks in turn. Tensor cores
multiply the integers of both, block by block of 32 columns, without rounding. The sums are
multiplied by the block's scale and unit and added in float32. The bits of a row of x do not depend
on the other rows, up to 16 or 32 in all, but differ from those of other backends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from jsparse.pallas_kernels.quantized_product.mosaic_integers import (
    SWIZZLE,
    block_products,
    fixed_point,
    put_in_fixed_point,
)
from jsparse.pallas_kernels.quantized_product.mosaic_shared import (
    BLOCKS_OF_H100,
    ROWS,
    store_registers,
    tiled,
)
from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks

GROUPS = (16, 32)  # maximum rows of x per launch; the division of the work depends only on these
PARTS = (1, 2, 4, 8)
MEMORY = 232_448  # bytes of shared memory per program
DIGIT_BYTES = 2**16  # target bytes of it for a part of x
UNIT_CHUNKS = 1  # overhead of a unit, in chunks


@dataclass(frozen=True)
class Problem:
    """Sizes of one launch; the key of compiled kernels.

    Attributes:
        rows: rows of x.
        padded: rows of x in a product, a multiple of 8.
        out, width: the sizes of the matrix.
        columns: columns per chunk.
        stages: chunks in shared memory, a multiple of `turns`.
        turns: multiplying warpgroups.
        parts: parts of the columns.
        blocks: programs.
        interpret: whether the kernel runs in the interpreter.
    """

    rows: int
    padded: int
    out: int
    width: int
    columns: int
    stages: int
    turns: int
    parts: int
    blocks: int
    interpret: bool

    @property
    def tiles(self) -> int:
        return self.out // ROWS

    @property
    def units(self) -> int:
        return self.tiles * self.parts

    @property
    def chunks(self) -> int:
        """The number of chunks per part."""
        return -(-self.width // (self.columns * self.parts))

    @property
    def part_columns(self) -> int:
        return self.chunks * self.columns

    @property
    def at_once(self) -> int:
        """The number of blocks with their products in registers at once."""
        return 4 if self.padded <= 16 else 2

    @property
    def others(self) -> int:
        """The multiplying warpgroups after the first; at least 1, since no buffer may be empty."""
        return max(self.turns - 1, 1)


def few_rows(
    x: Float[Array, "rows in"],
    matrix: Blocks,
    *,
    columns: int | None = None,
    stages: int | None = None,
    turns: int = 2,
    parts: int | None = None,
    blocks: int = BLOCKS_OF_H100,
    interpret: bool = False,
) -> Float32[Array, "parts rows out"]:
    """Multiplies at most 32 rows in one launch; the caller adds the returned parts.

    The integers override the fastest measured values. `interpret` runs the kernel on any machine,
    slowly, for tests.
    """
    (rows, width), out = x.shape, matrix["values"].shape[0]
    padded, group = -(-rows // 8) * 8, group_of(rows)
    if columns is None:
        columns = 256 if group == GROUPS[0] else 128
    if parts is None:
        parts = best_parts(out, width, columns, group)
    if stages is None:
        stages = most_stages(padded, columns, -(-width // (columns * parts)), turns)
    assert stages % turns == 0
    problem = Problem(
        *(rows, padded, out, width, columns, stages, turns, parts),
        blocks=min(blocks - blocks % parts, out // ROWS * parts),
        interpret=interpret,
    )
    return _kernel(problem)(x, matrix["values"], matrix["scales"])


def group_of(rows: int) -> int:
    """Returns the size in GROUPS that a launch of `rows` rows uses."""
    return next(most for most in GROUPS if rows <= most)


def best_parts(out: int, width: int, columns: int, rows: int) -> int:
    """Returns the number of parts that minimises the work of the busiest program.

    The bits of a row of x depend on this number, so it depends on the size in GROUPS instead of the
    actual number of rows.
    """

    def cost(parts: int) -> tuple[int, int]:
        chunks = -(-width // (columns * parts))
        blocks = BLOCKS_OF_H100 - BLOCKS_OF_H100 % parts
        units = -(-out // ROWS * parts // blocks)
        digits = 2 * rows * chunks * columns
        return max(digits, DIGIT_BYTES), units * (chunks + UNIT_CHUNKS)

    return min(PARTS, key=cost)


def most_stages(padded: int, columns: int, chunks: int, turns: int) -> int:
    """Returns the number of chunks that fit in shared memory: a multiple of `turns`, at most 8."""
    of_x = chunks * columns * padded * (2 + 4 / BLOCK)  # digits and units
    others = 4 * ROWS * padded * turns + 4096  # sums, and alignment of all of these
    stage = ROWS * columns * (1 + 2 / BLOCK)
    room = int((MEMORY - of_x - others) / stage)
    return max(min(room, 8) // turns, 1) * turns


class Refs(NamedTuple):
    """A launch's arrays, and a program's shared memory and barriers, in the kernel's order.

    One warpgroup fills a slot and another frees it. A slot's nth use is its barriers' nth phase.
    """

    x: Any  # [rows, in]
    values: Any  # [out, in]
    scales: Any  # [in / 32, out]
    out: Any  # [parts, rows, out]: sums of each part
    digits_s: Any  # [2 · padded, part_columns]: the high digits of x, then the low ones
    units_s: Any  # [part_columns / 32, padded]: units of x
    values_s: Any  # [stages, ROWS, columns]
    scales_s: Any  # [stages, columns / 32, ROWS]
    sums_s: Any  # [turns - 1, ROWS, padded]: sums of all warpgroups but the first
    x_full: Any  # all have converted their share of x to fixed point
    full: Any  # [stages]: values and scales of a chunk have arrived
    free: Any  # [stages]: they have been used
    sums_full: Any  # all but the first have stored their sums
    sums_free: Any  # the first has added them to its own


@cache
def _kernel(p: Problem):
    """Builds the launch, which returns each part's sums [parts, rows, out]."""

    def body(*refs):
        named, warpgroup = Refs(*refs), lax.axis_index("warpgroup")

        @pl.when(warpgroup < p.turns)
        def _():
            _multiply(p, named, warpgroup)

        @pl.when(warpgroup == p.turns)
        def _():
            _copy(p, named)

    body.__name__ = "quantized_product"

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.parts, p.rows, p.out), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2 * p.padded, p.part_columns), jnp.int8, transforms=tiled(SWIZZLE, 1)),
            plgpu.SMEM((p.part_columns // BLOCK, p.padded), jnp.float32),
            plgpu.SMEM((p.stages, ROWS, p.columns), jnp.int8, transforms=tiled(SWIZZLE, 1)),
            plgpu.SMEM((p.stages, p.columns // BLOCK, ROWS), jnp.float16),
            plgpu.SMEM((p.others, ROWS, p.padded), jnp.float32),
            plgpu.Barrier(num_arrivals=p.turns),
            plgpu.Barrier(num_arrivals=2, num_barriers=p.stages),
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
    put, multiply, store = (
        (_put, _products, _store)
        if p.interpret
        else (put_in_fixed_point, block_products, store_registers)
    )
    put(r.x, r.digits_s, r.units_s, part * p.part_columns, p.turns)
    if not p.interpret:
        plgpu.commit_smem()
    plgpu.barrier_arrive(r.x_full)
    plgpu.barrier_wait(r.x_full)

    def add_block(product, scale, unit, acc):
        product = (product[:, : p.padded] * 256 + product[:, p.padded :]).astype(jnp.float32)
        scale = _load(p, scale, plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)
        scale = lax.broadcast_in_dim(scale, acc.shape, [0])
        unit = lax.broadcast_in_dim(_load(p, unit, plgpu.Layout.WGMMA.reduce(0)), acc.shape, [1])
        return acc + product * (scale * unit)

    def add_chunk(unit, at, acc):
        slot = lax.rem(unit * p.chunks + at, p.stages)
        plgpu.barrier_wait(r.full.at[slot])
        for tile in range(0, p.columns, SWIZZLE):
            column = pl.multiple_of(at * p.columns + tile, SWIZZLE)
            of_w, of_x = pl.ds(tile, SWIZZLE), pl.ds(column, SWIZZLE)
            values, digits = r.values_s.at[slot, :, of_w], r.digits_s.at[:, of_x]
            for first in range(0, SWIZZLE // BLOCK, p.at_once):
                some = range(first, first + p.at_once)
                for nth, product in zip(some, multiply(values, digits, some), strict=True):
                    scale = r.scales_s.at[slot, tile // BLOCK + nth]
                    acc = add_block(product, scale, r.units_s.at[column // BLOCK + nth], acc)
        plgpu.barrier_arrive(r.free.at[slot])
        return acc

    def unit(nth, none):
        # takes every p.turns-th of all the program's chunks, so that a slot of shared memory always
        # belongs to the same warpgroup, which counts the phases of its barriers
        first = lax.rem(warpgroup + (p.turns - 1) * nth * p.chunks, p.turns)
        own = lax.div(p.chunks - first + p.turns - 1, p.turns)
        acc = jnp.full((ROWS, p.padded), 0.0, jnp.float32)
        acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA)
        acc = lax.fori_loop(0, own, lambda i, acc: add_chunk(nth, first + i * p.turns, acc), acc)

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
            store(r.out.at[part, :, _rows_of(p, nth)], whole)

        return none

    lax.fori_loop(0, units, unit, jnp.int32(0))

    @pl.when(warpgroup > 0)
    def _():
        plgpu.barrier_wait(r.sums_free)


def _copy(p: Problem, r: Refs) -> None:
    """Copies chunk after chunk into free slots.

    Rows and columns past the end become 0, in values and in scales.
    """
    part, units = _share(p)
    sent, blocks = units * p.chunks, p.columns // BLOCK

    def send(nth, none):
        slot = lax.rem(nth, p.stages)

        @pl.when(nth >= p.stages)
        def _():
            plgpu.barrier_wait(r.free.at[slot])

        rows, chunk = _rows_of(p, lax.div(nth, p.chunks)), lax.rem(nth, p.chunks)
        at = pl.multiple_of((part * p.chunks + chunk) * p.columns, p.columns)
        first = (part * p.chunks + chunk) * blocks
        copies = (
            (r.values.at[rows, pl.ds(at, p.columns)], r.values_s),
            (r.scales.at[pl.ds(first, blocks), rows], r.scales_s),
        )
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target.at[slot], r.full.at[slot])
        return none

    def drain(nth, none):
        plgpu.barrier_wait(r.free.at[lax.rem(nth, p.stages)])
        return none

    lax.fori_loop(0, sent, send, jnp.int32(0))
    lax.fori_loop(jnp.maximum(sent - p.stages, 0), sent, drain, jnp.int32(0))


def _load(p: Problem, ref: Any, layout: Any) -> Any:
    return ref[...] if p.interpret else plgpu.load(ref, layout=layout)


def _put(x: Any, digits_s: Any, units_s: Any, first: Any, _: int) -> None:
    """Emulates `put_in_fixed_point` in the interpreter."""
    padded, columns = digits_s.shape[0] // 2, digits_s.shape[1]
    given = jnp.pad(x[...], ((0, padded - x.shape[0]), (0, PARTS[-1] * columns)))
    digits, units = fixed_point(lax.dynamic_slice(given, (0, first), (padded, columns)))
    digits_s[...], units_s[...] = digits, units


def _products(values_s: Any, digits_s: Any, blocks: Sequence[int]) -> list[Any]:
    """Emulates `block_products` in the interpreter."""
    count = values_s.shape[1] // BLOCK
    values, digits = (
        jnp.split(ref[...].astype(jnp.int32), count, 1) for ref in (values_s, digits_s)
    )
    return [values[block] @ digits[block].T for block in blocks]


def _store(out: Any, sums: Any) -> None:  # [rows, ROWS], [ROWS, padded]
    out[...] = sums[:, : out.shape[0]].T
