# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Implements `api.quantized_product` with Mosaic GPU, for Hopper.

One persistent launch. A unit of work is 64 rows of the matrix over a part of its columns. One
warpgroup copies: chunks of columns by TMA, as many ahead as shared memory holds. The others take
chunks in turn, widen their integers to bfloat16, which is exact, and multiply them with x in the
tensor cores: a product for each block of 32 columns, whose sums in float32 are multiplied with the
blocks' scales. So only sums are rounded. A row of x has the same bits whichever others there are,
but not those of other backends.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxtyping import Array, Float, Float32

from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks

GROUP = 16  # rows of x in a launch
ROWS = 64  # of the matrix, the least that a product in registers has
BLOCKS_OF_H100 = 132  # multiprocessors; also those of an H200
PARTS = (1, 2, 4, 8)
X_BYTES = 115_000  # of shared memory that the default stages leave to a part of 16 rows of x
UNIT_CHUNKS = 2  # what a unit costs beside its chunks, in chunks


@dataclass(frozen=True)
class Problem:
    """Holds the sizes of one launch; it is the key of compiled kernels.

    Attributes:
        rows: of x that count.
        padded: the rows of x in a product, 8 or 16.
        out, width: the sizes of the matrix.
        columns: of a chunk.
        stages: the chunks that shared memory holds, a multiple of `turns`.
        turns: the warpgroups that multiply.
        parts: the parts that columns are cut into.
        blocks: the programs.
        interpret: whether it runs in the interpreter.
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
        """Of a part."""
        return -(-self.width // (self.columns * self.parts))

    @property
    def part_columns(self) -> int:
        return self.chunks * self.columns


def quantized_product(
    x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any, **how: Any
) -> Float[Array, "rows out"]:
    """Implements `api.quantized_product` with Mosaic GPU.

    More than 16 rows are multiplied one group after the other, each of which reads the matrix;
    `how` goes to `few_rows`.
    """
    groups = [x[first : first + GROUP] for first in range(0, len(x), GROUP)]
    return jnp.concatenate([few_rows(group, matrix, **how) for group in groups]).astype(dtype)


def few_rows(
    x: Float[Array, "rows in"],
    matrix: Blocks,
    *,
    columns: int = 128,
    stages: int = 12,
    turns: int = 4,
    parts: int | None = None,
    blocks: int = BLOCKS_OF_H100,
    interpret: bool = False,
) -> Float32[Array, "rows out"]:
    """Multiplies at most 16 rows, in one launch.

    The integers override what was measured best; `interpret` runs on any machine, slowly, for
    tests.
    """
    (rows, width), out = x.shape, matrix["values"].shape[0]
    padded = -(-rows // 8) * 8
    if parts is None:
        parts = best_parts(out, width, columns)
    assert stages % turns == 0
    problem = Problem(
        *(rows, padded, out, width, columns, stages, turns, parts),
        blocks=min(blocks - blocks % parts, out // ROWS * parts),
        interpret=interpret,
    )
    if rows > 8:  # TMA takes a part of one tile of rows, or whole ones
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    return jnp.sum(_kernel(problem)(x, matrix["values"], matrix["scales"]), axis=0)


def best_parts(out: int, width: int, columns: int) -> int:
    """Returns the number of parts with which the busiest program has least to do.

    It knows nothing of the rows of x, whose bits depend on it.
    """

    def cost(parts: int) -> tuple[bool, int]:
        chunks = -(-width // (columns * parts))
        blocks = BLOCKS_OF_H100 - BLOCKS_OF_H100 % parts
        units = -(-out // ROWS * parts // blocks)
        return 2 * GROUP * chunks * columns > X_BYTES, units * (chunks + UNIT_CHUNKS)

    return min(PARTS, key=cost)


@cache
def _kernel(p: Problem):
    """Builds the launch, which returns each part's sums [parts, rows, out]."""
    blocks_of_chunk = p.columns // BLOCK
    multiply, store = (_dots, _store) if p.interpret else (_wgmmas, _store_registers)

    def body(x, values, scales, out, x_s, values_s, scales_s, sums_s, x_full, full, free, *sums):
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        part = lax.rem(block, p.parts)  # of all of a program's units: p.blocks is a multiple
        units = lax.div(p.units - block + p.blocks - 1, p.blocks)
        sums_full, sums_free = sums

        def rows_of(unit):
            tile = lax.div(block + unit * p.blocks, p.parts)
            return pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)

        @pl.when(warpgroup < p.turns)
        def _():
            plgpu.barrier_wait(x_full)

            def chunk(unit, at, acc):
                slot = lax.rem(unit * p.chunks + at, p.stages)
                plgpu.barrier_wait(full.at[slot])
                products = multiply(values_s.at[slot], x_s, at * blocks_of_chunk)
                for nth_block, product in enumerate(products):
                    scale = _load(p, scales_s.at[slot, nth_block], plgpu.Layout.WGMMA.reduce(1))
                    scale = lax.broadcast_in_dim(scale.astype(jnp.float32), acc.shape, [0])
                    acc = acc + product * scale
                plgpu.barrier_arrive(free.at[slot])
                return acc

            def unit(nth, none):
                # of all of a program's chunks every p.turns-th, so that a slot of shared memory is
                # always the same warpgroup's, which counts the phases of its barriers
                first = lax.rem(warpgroup + (p.turns - 1) * nth * p.chunks, p.turns)
                own = lax.div(p.chunks - first + p.turns - 1, p.turns)
                acc = jnp.full((ROWS, p.padded), 0.0, jnp.float32)
                acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA)
                acc = lax.fori_loop(
                    0, own, lambda i, acc: chunk(nth, first + i * p.turns, acc), acc
                )

                @pl.when(warpgroup > 0)
                def _():
                    @pl.when(nth > 0)
                    def _():
                        plgpu.barrier_wait(sums_free)

                    sums_s[warpgroup - 1] = acc
                    plgpu.barrier_arrive(sums_full)

                @pl.when(warpgroup == 0)
                def _():
                    whole = acc
                    if p.turns > 1:
                        plgpu.barrier_wait(sums_full)
                    for other in range(p.turns - 1):
                        whole = whole + _load(p, sums_s.at[other], plgpu.Layout.WGMMA)
                    if p.turns > 1:
                        plgpu.barrier_arrive(sums_free)
                    store(out.at[part, :, rows_of(nth)], whole)

                return none

            lax.fori_loop(0, units, unit, jnp.int32(0))

            @pl.when(warpgroup > 0)
            def _():
                plgpu.barrier_wait(sums_free)

        @pl.when(warpgroup == p.turns)
        def _():
            # rows and columns past the end become 0, of values and scales, too
            first_column = pl.multiple_of(part * p.part_columns, p.part_columns)
            own = x.at[pl.ds(part * 0, p.padded), pl.ds(first_column, p.part_columns)]
            plgpu.copy_gmem_to_smem(own, x_s, x_full)

            def send(nth, none):
                slot = lax.rem(nth, p.stages)

                @pl.when(nth >= p.stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                rows, chunk = rows_of(lax.div(nth, p.chunks)), lax.rem(nth, p.chunks)
                at = pl.multiple_of((part * p.chunks + chunk) * p.columns, p.columns)
                first = (part * p.chunks + chunk) * blocks_of_chunk
                copies = (
                    (values.at[rows, pl.ds(at, p.columns)], values_s),
                    (scales.at[pl.ds(first, blocks_of_chunk), rows], scales_s),
                )
                for source, target in copies:
                    plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])
                return none

            sent = units * p.chunks
            lax.fori_loop(0, sent, send, jnp.int32(0))

            def drain(nth, none):
                plgpu.barrier_wait(free.at[lax.rem(nth, p.stages)])
                return none

            lax.fori_loop(jnp.maximum(sent - p.stages, 0), sent, drain, jnp.int32(0))

    body.__name__ = "quantized_product"

    def tiled(width: int, nbytes: int) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * nbytes)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.parts, p.rows, p.out), jnp.float32),
        scratch_types=[
            plgpu.SMEM((p.padded, p.part_columns), jnp.bfloat16, transforms=tiled(BLOCK, 2)),
            plgpu.SMEM((p.stages, ROWS, p.columns), jnp.int8, transforms=tiled(128, 1)),
            plgpu.SMEM((p.stages, blocks_of_chunk, ROWS), jnp.float16),
            plgpu.SMEM((max(p.turns - 1, 1), ROWS, p.padded), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=p.stages),
            plgpu.Barrier(num_barriers=p.stages),
            plgpu.Barrier(num_arrivals=max(p.turns - 1, 1)),
            plgpu.Barrier(),
        ],
        grid=(p.blocks,),
        grid_names=("block",),
        num_threads=p.turns + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if p.interpret else None,
    )


def _load(p: Problem, ref: Any, layout: Any) -> Any:
    return ref[...] if p.interpret else plgpu.load(ref, layout=layout)


def _block(x_s: Any, nth: Any) -> Any:
    """Returns a block's columns of x, [padded, 32]."""
    return x_s.at[:, pl.ds(pl.multiple_of(nth * BLOCK, BLOCK), BLOCK)]


def _dots(values_s: Any, x_s: Any, first: Any) -> list[Any]:
    """Returns the products of a chunk's blocks with x, in the interpreter."""
    values = values_s[...].astype(jnp.float32)
    count = values.shape[1] // BLOCK
    x = [_block(x_s, first + nth)[...].astype(jnp.float32) for nth in range(count)]
    parts = jnp.split(values, count, axis=1)
    return [jnp.dot(own, of_x.T) for own, of_x in zip(parts, x, strict=True)]


def _wgmmas(values_s: Any, x_s: Any, first: Any) -> list[Any]:
    """Returns the products of a chunk's blocks with x, in the tensor cores."""
    values = plgpu.load(values_s, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    values = plgpu.layout_cast(values.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
    count = values.shape[1] // BLOCK

    def products(*accs):
        for nth, acc in enumerate(accs):
            own = values[:, nth * BLOCK : (nth + 1) * BLOCK]
            plgpu.wgmma(acc, own, _block(x_s, first + nth).transpose((1, 0)))
        return [acc[...] for acc in accs]

    acc = plgpu.ACC((ROWS, x_s.shape[0]), jnp.float32)
    return pl.run_scoped(products, *[acc] * count)


def _store(out: Any, sums: Any) -> None:  # [rows, ROWS], [ROWS, padded]
    out[...] = sums[:, : out.shape[0]].T


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
def _store_registers(_, out, sums) -> None:  # [rows, ROWS], [ROWS, padded]
    """Stores the rows of x that count; a thread holds two of every 8, for two rows of the matrix.

    Thread l of warp w has rows 16 w + l / 4 and the one 8 below, and of every 8 columns two, from
    2 (l mod 4) on.
    """

    def number(like, n):
        return arith.constant(like.type, n)

    def index(x):
        return arith.index_cast(ir.IndexType.get(), x)

    thread = mgpu.thread_idx()
    thread = arith.remui(thread, number(thread, 128))
    warp, lane = (op(thread, number(thread, 32)) for op in (arith.divui, arith.remui))
    row, pair = (op(lane, number(lane, 4)) for op in (arith.divui, arith.remui))
    row = arith.addi(row, arith.muli(warp, number(warp, 16)))
    column = arith.muli(pair, number(pair, 2))
    parts = sums.registers.reshape(-1, 2)  # [columns / 8, half]
    for nth, of_column in enumerate(parts):
        for half, values in enumerate(of_column):
            at = index(arith.addi(row, number(row, 8 * half)))
            for one in range(2):
                own = arith.addi(column, number(column, 8 * nth + one))
                counts = arith.cmpi(arith.CmpIPredicate.ult, own, number(own, out.type.shape[0]))
                with mgpu.when(counts):
                    memref.store(vector.extract(values, [], [one]), out, [index(own), at])
