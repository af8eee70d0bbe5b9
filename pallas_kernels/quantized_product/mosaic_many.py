# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Implements `api.quantized_product` with Mosaic GPU for many rows, for Hopper.

One persistent launch. A unit of work is 128 rows of the matrix by up to 256 of x, over a part of
their columns. One warpgroup copies chunks of both by TMA, as many ahead as shared memory holds. Two
take 64 rows of the matrix each: they widen their integers in registers, multiply them with the
blocks' scales, round that to bfloat16, as the reference does, and multiply it with x in the tensor
cores, which work while the next chunk is widened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.pallas_kernels.quantized_product.mosaic_shared import (
    BLOCKS_OF_H100,
    ROWS,
    store_registers,
    tiled,
)
from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks

WARPGROUPS = 2  # that multiply
TILE = ROWS * WARPGROUPS  # rows of the matrix: 64 of each
CHUNK = 64  # columns
OUT = 64  # rows of x that are stored at once
TILES, PARTS = (64, 128, 256), (1, 2, 4, 8)
UNIT_CHUNKS = 4  # what a unit costs beside its chunks, in chunks
SUMS_A_CHUNK = 2**18  # sums of parts that are written and read again in the time of a chunk


@dataclass(frozen=True)
class Problem:
    """Holds the sizes of one launch; it is the key of compiled kernels.

    Attributes:
        rows: of x, a multiple of 8.
        out, width: the sizes of the matrix.
        tile: the rows of x in a unit.
        parts: the parts that columns are cut into.
        stages: the chunks that shared memory holds.
        blocks: the most programs.
        dtype: of what is stored, bfloat16, or float32, as where there are parts.
        interpret: whether it runs in the interpreter.
    """

    rows: int
    out: int
    width: int
    tile: int
    parts: int
    stages: int
    blocks: int
    dtype: jnp.dtype
    interpret: bool

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def units(self) -> int:
        return -(-self.out // TILE) * self.row_tiles * self.parts

    @property
    def programs(self) -> int:
        return min(self.blocks, self.units)

    @property
    def chunks(self) -> int:
        """Of a part."""
        return -(-self.width // (CHUNK * self.parts))


def many_rows(
    x: Float[Array, "rows in"],
    matrix: Blocks,
    *,
    dtype: DTypeLike,
    tile: int | None = None,
    parts: int | None = None,
    stages: int = 4,
    blocks: int = BLOCKS_OF_H100,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """Multiplies any number of rows, in one launch.

    How work is shared out, and with it the bits of a row, depends on the number of rows.

    The integers override what was measured best; `interpret` runs on any machine, slowly, for
    tests.
    """
    (rows, width), out = x.shape, matrix["values"].shape[0]
    padded = -(-rows // 8) * 8  # TMA takes whole tiles of rows
    if tile is None:
        tile = next((size for size in TILES if rows <= size), TILES[-1])
    if parts is None:
        parts = best_parts(rows, out, width, tile)
    assert stages > 1  # a chunk's slot is free after the next chunk is there
    problem = Problem(
        *(padded, out, width, tile, parts, stages, blocks),
        dtype=jnp.dtype(dtype if parts == 1 and dtype == jnp.bfloat16 else jnp.float32),
        interpret=interpret,
    )
    if padded > rows:
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    sums = _kernel(problem)(x, matrix["values"], matrix["scales"])
    return reduce(add, [sums[part, :rows] for part in range(parts)]).astype(dtype)


def best_parts(rows: int, out: int, width: int, tile: int) -> int:
    """Returns the number of parts with which the busiest program has least to do.

    With more than one, XLA adds their sums up, which takes as long as some chunks do.
    """

    def cost(parts: int) -> int:
        units = -(-out // TILE) * -(-rows // tile) * parts
        chunks = -(-width // (CHUNK * parts)) + UNIT_CHUNKS
        added = parts * rows * out // SUMS_A_CHUNK if parts > 1 else 0
        return -(-units // BLOCKS_OF_H100) * chunks + added

    return min(PARTS, key=cost)


class Refs(NamedTuple):
    """Names a launch's arrays, and a program's shared memory and barriers, in their order."""

    x: Any  # [rows, in]
    values: Any  # [out, in]
    scales: Any  # [in / 32, out]
    out: Any  # [parts, rows, out]
    x_s: Any  # [stages, tile, CHUNK]
    values_s: Any  # [stages, TILE, CHUNK]
    scales_s: Any  # [stages, CHUNK / 32, TILE]
    out_s: Any  # [WARPGROUPS, OUT, ROWS]
    full: Any  # [stages]: a chunk is there
    free: Any  # [stages]: it is used


@cache
def _kernel(p: Problem):
    """Builds the launch, which returns each part's sums [parts, rows, out]."""

    def body(*refs):
        r, warpgroup = Refs(*refs), lax.axis_index("warpgroup")

        # 128 threads at 40 and twice 128 at 232 take 64,512 of 65,536 registers
        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            _multiply(p, r, warpgroup)

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            _copy(p, r)

    body.__name__ = "quantized_product_of_many"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.parts, p.rows, p.out), p.dtype),
        scratch_types=[
            plgpu.SMEM((p.stages, p.tile, CHUNK), jnp.bfloat16, transforms=tiled(BLOCK, 2)),
            plgpu.SMEM((p.stages, TILE, CHUNK), jnp.int8, transforms=tiled(CHUNK, 1)),
            plgpu.SMEM((p.stages, CHUNK // BLOCK, TILE), jnp.float16),
            plgpu.SMEM((WARPGROUPS, OUT, ROWS), jnp.bfloat16, transforms=tiled(ROWS, 2)),
            plgpu.Barrier(num_arrivals=3, num_barriers=p.stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=p.stages),
        ],
        grid=(p.programs,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if p.interpret else None,
    )


def _units(p: Problem) -> Any:
    """Returns the number of this program's units."""
    return lax.div(p.units - lax.axis_index("block") + p.programs - 1, p.programs)


def _place(p: Problem, nth: Any) -> tuple[Any, Any, Any]:
    """Returns the part, the first row of the matrix and that of x of a program's nth unit.

    Neighbours have the same rows of the matrix: all but the first find them in the cache.
    """
    unit = lax.axis_index("block") + nth * p.programs
    tile, row_tile = lax.div(unit, p.row_tiles), lax.rem(unit, p.row_tiles)
    part, tile = lax.rem(tile, p.parts), lax.div(tile, p.parts)
    return part, pl.multiple_of(tile * TILE, TILE), pl.multiple_of(row_tile * p.tile, p.tile)


def _multiply(p: Problem, r: Refs, warpgroup: Any) -> None:
    """Multiplies every unit's chunks with 64 rows of the matrix, and stores the sums."""
    own = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    widened, sum_up, store = (
        (_numbers, _sum_values, _store)
        if p.interpret
        else (_number_registers, _sum_registers, _store_registers)
    )

    def widen(n):
        slot = lax.rem(n, p.stages)
        plgpu.barrier_wait(r.full.at[slot])
        return widened(r.values_s.at[slot, own], r.scales_s.at[slot, :, own])

    def x_of(n):
        return r.x_s.at[lax.rem(n, p.stages)]

    def free(n):
        plgpu.barrier_arrive(r.free.at[lax.rem(n, p.stages)])

    def unit(nth, none):
        sums = sum_up(p, nth * p.chunks, widen, x_of, free)
        part, first, first_row = _place(p, nth)
        rows = pl.ds(first + pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
        store(p, r, warpgroup, sums, (part, first_row, rows))
        return none

    lax.fori_loop(0, _units(p), unit, jnp.int32(0))
    if not p.interpret:  # before this memory is another program's
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sum_registers(p: Problem, first: Any, widen: Any, x_of: Any, free: Any) -> Any:
    """Returns the product of a unit's chunks, from the first on, of the tensor cores.

    While they multiply a chunk, threads widen the next one.
    """

    def run(acc):
        def multiply(numbers, x_s):
            for nth, some in enumerate(numbers):
                x = x_s.at[:, pl.ds(nth * BLOCK, BLOCK)]
                plgpu.wgmma(acc, some, x.transpose((1, 0)))

        def chunk(n, numbers):
            multiply(numbers, x_of(n))
            following = widen(n + 1)
            plgpu.wgmma_wait(0)
            free(n)
            return following

        last = first + p.chunks - 1
        multiply(lax.fori_loop(first, last, chunk, widen(first)), x_of(last))
        plgpu.wgmma_wait(0)
        free(last)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, p.tile), jnp.float32))


def _number_registers(values_s: Any, scales_s: Any) -> tuple[Any, ...]:
    """Returns a chunk's numbers as tensor cores take them, [64, 32] of each block."""
    values = plgpu.load(values_s, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    values = plgpu.layout_cast(values.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
    numbers = []
    for nth in range(CHUNK // BLOCK):
        scale = plgpu.load(scales_s.at[nth], layout=plgpu.Layout.WGMMA.reduce(1))
        wide = values[:, nth * BLOCK : (nth + 1) * BLOCK].astype(jnp.float32)
        wide = wide * lax.broadcast_in_dim(scale.astype(jnp.float32), wide.shape, [0])
        numbers.append(wide.astype(jnp.bfloat16))
    return tuple(numbers)


def _store_registers(p: Problem, r: Refs, warpgroup: Any, sums: Any, place: Any) -> None:
    """Stores the sums, whose columns are rows of x."""
    part, first_row, rows = place
    if p.dtype == jnp.float32:
        _store_by_eight(p, r, sums, place, store_registers)
        return
    sums = sums.astype(p.dtype)
    for at in range(0, p.tile, OUT):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        turned = plgpu.layout_cast(sums[:, at : at + OUT], plgpu.Layout.WGMMA_TRANSPOSED)
        r.out_s.at[warpgroup].transpose((1, 0))[...] = turned
        plgpu.commit_smem()
        # what lies past the end is not stored
        own = r.out.at[part, pl.ds(first_row + at, OUT), rows]
        plgpu.copy_smem_to_gmem(r.out_s.at[warpgroup], own)


def _store_by_eight(p: Problem, r: Refs, sums: Any, place: Any, store: Callable[..., None]) -> None:
    """Stores what does not lie past the end, eight rows of x at a time."""
    part, first_row, rows = place
    for at in range(0, p.tile, 8):

        @pl.when((first_row + at < p.rows) & (rows.start < p.out))
        def _(at=at):
            store(r.out.at[part, pl.ds(first_row + at, 8), rows], sums[:, at : at + 8])


def _sum_values(p: Problem, first: Any, widen: Any, x_of: Any, free: Any) -> Any:
    """Returns the product of a unit's chunks, in the interpreter."""

    def chunk(n, acc):
        acc = acc + jnp.dot(widen(n), x_of(n)[...].astype(jnp.float32).T)
        free(n)
        return acc

    zeros = jnp.zeros((ROWS, p.tile), jnp.float32)
    return lax.fori_loop(first, first + p.chunks, chunk, zeros)


def _numbers(values_s: Any, scales_s: Any) -> Any:
    """Returns a chunk's numbers, in the interpreter."""
    scales = jnp.repeat(scales_s[...].astype(jnp.float32), BLOCK, axis=0).T
    wide = (values_s[...].astype(jnp.float32) * scales).astype(jnp.bfloat16)
    return wide.astype(jnp.float32)


def _store(p: Problem, r: Refs, warpgroup: Any, sums: Any, place: Any) -> None:
    """Stores the sums, in the interpreter."""

    def store(out: Any, some: Any) -> None:
        out[...] = some.T.astype(p.dtype)

    _store_by_eight(p, r, sums, place, store)


def _copy(p: Problem, r: Refs) -> None:
    """Copies chunk after chunk into slots that are free; what lies past the end becomes 0."""

    def send(n, none):
        slot = lax.rem(n, p.stages)

        @pl.when(n >= p.stages)
        def _():
            plgpu.barrier_wait(r.free.at[slot])

        part, first, first_row = _place(p, lax.div(n, p.chunks))
        chunk = part * p.chunks + lax.rem(n, p.chunks)
        columns = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)
        blocks = pl.ds(chunk * (CHUNK // BLOCK), CHUNK // BLOCK)
        copies = (
            (r.values.at[pl.ds(first, TILE), columns], r.values_s),
            (r.scales.at[blocks, pl.ds(first, TILE)], r.scales_s),
            (r.x.at[pl.ds(first_row, p.tile), columns], r.x_s),
        )
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target.at[slot], r.full.at[slot])
        return none

    def drain(n, none):
        plgpu.barrier_wait(r.free.at[lax.rem(n, p.stages)])
        return none

    sent = _units(p) * p.chunks
    lax.fori_loop(0, sent, send, jnp.int32(0))
    lax.fori_loop(jnp.maximum(sent - p.stages, 0), sent, drain, jnp.int32(0))
