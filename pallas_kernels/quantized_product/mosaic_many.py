# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Implements `api.quantized_product` with Mosaic GPU for many rows, for Hopper.

It is one persistent launch. A unit of work is a tile of the matrix by up to 256 rows of x. It spans
all columns, or a part of them if that gives more programs work in the last wave; XLA then adds the
parts. One warpgroup copies chunks of both operands by TMA, as far ahead as shared memory allows.
Two take 64 rows of the matrix each. They widen codes in registers (`mosaic_widening`), rounded to
bfloat16 like the reference's, and multiply them by x in the tensor cores. With many rows, the two
programs of a cluster take adjacent rows of the matrix and the same rows of x, which TMA multicasts
to both.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.pallas_kernels.quantized_product.mosaic_many_problem import (
    BOX,
    CHUNK,
    MULTICAST,
    ROW_TILES,
    TILE,
    WARPGROUPS,
    Piece,
    Problem,
    best_split,
)
from jsparse.pallas_kernels.quantized_product.mosaic_shared import (
    BLOCKS_OF_H100,
    ROWS,
    store_registers,
    tiled,
)
from jsparse.pallas_kernels.quantized_product.mosaic_widening import widened
from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks, Form, codes_of, form_of, out_axis
from jsparse.parts import total

OUT = 64  # rows of x per store


def many_rows(
    x: Float[Array, "rows in"],
    matrix: Blocks,
    *,
    dtype: DTypeLike,
    row_tile: int | None = None,
    split: tuple[int, int] | None = None,
    stages: int = 4,
    blocks: int = BLOCKS_OF_H100,
    cluster: int | None = None,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """Multiplies any number of rows in one launch.

    The division of the work, and with it the bits of a row, depends on the number of rows.
    `row_tile` to `cluster` override the defaults (`split`: `Problem`'s `whole` and `parts`).
    `interpret` runs the kernel on any machine, slowly, for tests.
    """
    (rows, width), out, form = x.shape, len(matrix["values"]), form_of(matrix)
    padded = -(-rows // 8) * 8  # TMA copies whole tiles of rows
    if row_tile is None:
        row_tile = next((size for size in ROW_TILES if rows <= size), ROW_TILES[-1])
    if cluster is None:
        cluster = 2 if row_tile >= MULTICAST and not interpret else 1
    # a slot is freed once the next chunk has arrived, so a single slot would deadlock
    assert stages > 1
    dtype = jnp.dtype(dtype)
    kept = dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
    p = Problem(form, padded, out, width, row_tile, cluster, stages, blocks, kept, interpret)
    p = best_split(p) if split is None else replace(p, whole=split[0], parts=split[1])
    if padded > rows:
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    made = _kernel(p)(x, *(matrix[name] for name in p.pieces))
    made = [some[..., :rows, :] for some in made]
    if not p.rest:
        return made[0].astype(dtype)
    rest = total(made[-1], 2, dtype)
    if not p.whole:
        return rest
    return lax.dynamic_update_slice(made[0].astype(dtype), rest, (0, p.first_of_rest))


class Refs(NamedTuple):
    """A launch's arrays, and a program's shared memory and barriers, in the kernel's order."""

    x: Any  # [rows, in]
    matrix: dict[str, Any]  # as in `Blocks`
    out: Any  # [rows, out], written for whole tiles; None if there are none
    sums: Any  # [parts, rows, the other columns]; None if there are none
    x_s: Any  # [stages, row_tile, CHUNK]
    matrix_s: dict[str, Any]  # [stages, a chunk's piece]
    out_s: Any  # [WARPGROUPS, OUT, ROWS]
    full: Any  # [stages]: a chunk has arrived
    free: Any  # [stages]: all its readers have used it


@cache
def _kernel(p: Problem):
    """Builds the launch, which returns products of whole tiles, if any, and the others' sums."""
    out_type = []
    if p.whole:
        out_type.append(jax.ShapeDtypeStruct((p.rows, p.out), p.dtype))
    if p.rest:
        shape = (p.parts, p.rows, p.out - p.first_of_rest)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))

    def body(*refs):
        given = iter(refs)
        x, matrix = next(given), {name: next(given) for name in p.pieces}
        out, sums = (next(given) if some else None for some in (p.whole, p.rest))
        x_s, matrix_s = next(given), {name: next(given) for name in p.pieces}
        r = Refs(x, matrix, out, sums, x_s, matrix_s, *given)
        warpgroup = lax.axis_index("warpgroup")

        # 128 threads with 40 and twice 128 with 232 use 64,512 of 65,536 registers
        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            _multiply(p, r, warpgroup)

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            _copy(p, r)

    body.__name__ = "quantized_product_of_many"
    free_barrier, cluster = plgpu.Barrier, {}
    if p.cluster > 1:  # a slot is free when both programs have used it
        free_barrier = partial(plgpu.ClusterBarrier, collective_axes=("program",))
        cluster = {"cluster": (p.cluster,), "cluster_names": ("program",)}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((p.stages, p.row_tile, CHUNK), jnp.bfloat16, transforms=tiled(BLOCK, 2)),
            *(
                plgpu.SMEM(
                    (p.stages, *piece.shape),
                    piece.dtype,
                    transforms=tiled(piece.shape[1], 1)
                    if out_axis(name) == 0 and piece.shape[1] > BOX
                    else (),
                )
                for name, piece in p.pieces.items()
            ),
            plgpu.SMEM((WARPGROUPS, OUT, ROWS), jnp.bfloat16, transforms=tiled(ROWS, 2)),
            plgpu.Barrier(num_arrivals=1 + len(p.pieces), num_barriers=p.stages),
            free_barrier(num_arrivals=WARPGROUPS, num_barriers=p.stages),
        ],
        grid=(p.clusters,),
        grid_names=("cluster",),
        **cluster,
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if p.interpret else None,
    )


class Unit(NamedTuple):
    """A program's unit of work."""

    whole: Any  # whether it spans all columns
    part: Any  # index of the part of the columns; 0 if whole
    out_row: Any  # first row of the matrix
    x_row: Any  # first row of x
    first_chunk: Any
    chunks: Any  # number of chunks


def _each_unit(p: Problem, do: Callable[[Unit, Any], None]) -> Any:
    """Calls `do` with each unit of this program and the number of chunks before it.

    Returns the number of all chunks. Neighbouring programs share rows of the matrix, so all but the
    first find them in the cache.
    """
    cluster = lax.axis_index("cluster")

    def one(nth, n):
        place = cluster + nth * p.clusters
        tile, row_tile = lax.div(place, p.row_tiles), lax.rem(place, p.row_tiles)
        whole, beyond = tile < p.whole, jnp.maximum(tile - p.whole, 0)
        part = lax.rem(beyond, p.parts)
        tile = jnp.minimum(tile, p.whole) + lax.div(beyond, p.parts)
        if p.cluster > 1:
            tile = tile * p.cluster + lax.axis_index("program")
        unit = Unit(
            whole,
            part,
            pl.multiple_of(tile * TILE, TILE),
            pl.multiple_of(row_tile * p.row_tile, p.row_tile),
            part * p.part_chunks,
            jnp.where(whole, p.chunks, p.part_chunks),
        )
        do(unit, n)
        return n + unit.chunks

    units = lax.div(p.units - cluster + p.clusters - 1, p.clusters)
    return lax.fori_loop(0, units, one, jnp.int32(0))


def _multiply(p: Problem, r: Refs, warpgroup: Any) -> None:
    """Multiplies every unit's chunks by 64 rows of the matrix, and stores the sums."""
    own = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    numbers_of, sum_up = (_numbers, _sum_values) if p.interpret else (widened, _sum_registers)

    def widen(first, n):
        slot = lax.rem(n, p.stages)
        plgpu.barrier_wait(r.full.at[slot])
        chunk = {}
        for name, piece in r.matrix_s.items():
            chunk[name] = piece.at[slot, own] if out_axis(name) == 0 else piece.at[slot, :, own]
        return numbers_of(p.form, chunk, n - first)

    def x_of(n):
        return r.x_s.at[lax.rem(n, p.stages)]

    def free(n):
        # one thread arrives for its warpgroup, so all threads must have finished first
        if p.cluster > 1:
            _meet()
        plgpu.barrier_arrive(r.free.at[lax.rem(n, p.stages)])

    def unit(unit, n):
        widen_chunk = partial(widen, n - unit.first_chunk)
        sums = sum_up(p, n, n + unit.chunks - 1, widen_chunk, x_of, free)
        _store(p, r, warpgroup, sums, unit)

    _each_unit(p, unit)
    if not p.interpret:  # before another program uses this memory
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sum_registers(p: Problem, first: Any, last: Any, widen: Any, x_of: Any, free: Any) -> Any:
    """Returns the tensor cores' product of a unit's chunks, from the first to the last.

    While tensor cores multiply a chunk, threads widen the next one.
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

        multiply(lax.fori_loop(first, last, chunk, widen(first)), x_of(last))
        plgpu.wgmma_wait(0)
        free(last)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, p.row_tile), jnp.float32))


@plgpu.inline_mgpu()
def _meet(_) -> None:
    """Synchronises a warpgroup's threads."""
    mgpu.utils.warpgroup_barrier()


def _sum_values(p: Problem, first: Any, last: Any, widen: Any, x_of: Any, free: Any) -> Any:
    """Returns the product of a unit's chunks, in the interpreter."""

    def chunk(n, acc):
        acc = acc + jnp.dot(widen(n), x_of(n)[...].astype(jnp.float32).T)
        free(n)
        return acc

    return lax.fori_loop(first, last + 1, chunk, jnp.zeros((ROWS, p.row_tile), jnp.float32))


def _numbers(form: Form, chunk: dict[str, Any], nth: Any) -> Any:
    """Returns the nth chunk's numbers, in the interpreter."""
    stored: Any = {name: ref[...] for name, ref in chunk.items()}
    if "high" in stored:
        high, size = stored["high"], CHUNK * (form.bits - 4) // 8
        first = lax.rem(nth, high.shape[1] // size) * size
        stored["high"] = lax.dynamic_slice_in_dim(high, first, size, axis=1)
    numbers = codes_of(stored, form).astype(jnp.float32)

    def each(name: str) -> Any:
        factors = stored[name].astype(jnp.float32)
        return jnp.repeat(factors, CHUNK // len(factors), axis=0).T

    scales = each("scales")
    if form.supers:
        scales = scales * each("super_scales")
    if form.mins:
        offsets = each("mins") * (each("super_mins") if form.supers else scales)
        numbers = (numbers + form.half) * scales - offsets
    else:
        numbers = numbers * scales
    return numbers.astype(jnp.bfloat16).astype(jnp.float32)


def _store(p: Problem, r: Refs, warpgroup: Any, sums: Any, unit: Unit) -> None:
    """Stores a unit's products, or its part of them, as rows of x."""
    out_row = unit.out_row + pl.multiple_of(warpgroup * ROWS, ROWS)
    by_eight = _store_values if p.interpret else store_registers

    def products():
        if p.interpret or p.dtype == jnp.float32:
            _store_by_eight(p, r.out, sums, unit.x_row, out_row, by_eight)
        else:
            # if an axis has only one tile, Mosaic drops the axis, and TMA would store a tile past
            # the end over the first
            pl.when(out_row < p.out)(
                lambda: _store_tiles(p, r, warpgroup, sums, unit.x_row, out_row)
            )

    def parts():
        at = out_row - p.first_of_rest
        _store_by_eight(p, r.sums.at[unit.part], sums, unit.x_row, at, by_eight)

    if p.whole and p.rest:
        pl.when(unit.whole)(products)
        pl.when(~unit.whole)(parts)
    elif p.whole:
        products()
    else:
        parts()


def _store_tiles(p: Problem, r: Refs, warpgroup: Any, sums: Any, x_row: Any, out_row: Any) -> None:
    """Stores products by TMA, except those past the end."""
    sums = sums.astype(p.dtype)
    for at in range(0, p.row_tile, OUT):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        turned = plgpu.layout_cast(sums[:, at : at + OUT], plgpu.Layout.WGMMA_TRANSPOSED)
        r.out_s.at[warpgroup].transpose((1, 0))[...] = turned
        plgpu.commit_smem()
        own = r.out.at[pl.ds(x_row + at, OUT), pl.ds(out_row, ROWS)]
        plgpu.copy_smem_to_gmem(r.out_s.at[warpgroup], own)


def _store_by_eight(
    p: Problem, out: Any, sums: Any, x_row: Any, out_row: Any, store: Callable[..., None]
) -> None:
    """Stores products, except those past the end, eight rows of x at a time."""
    for at in range(0, p.row_tile, 8):

        @pl.when((x_row + at < p.rows) & (out_row < out.shape[-1]))
        def _(at=at):
            store(out.at[pl.ds(x_row + at, 8), pl.ds(out_row, ROWS)], sums[:, at : at + 8])


def _store_values(out: Any, some: Any) -> None:
    """Stores eight rows, in the interpreter."""
    out[...] = some.T.astype(out.dtype)


def _copy(p: Problem, r: Refs) -> None:
    """Copies chunk after chunk into free slots; elements past the end become 0."""
    multicast = "program" if p.cluster > 1 else None

    def copy(unit, n):
        def send(nth, none):
            slot = lax.rem(n + nth, p.stages)

            @pl.when(n + nth >= p.stages)
            def _():
                plgpu.barrier_wait(r.free.at[slot])

            chunk = unit.first_chunk + nth
            columns = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)
            x = r.x.at[pl.ds(unit.x_row, p.row_tile), columns]
            copies = [(x, r.x_s, multicast)]
            for name, piece in p.pieces.items():
                place = _place(piece, out_axis(name), unit.out_row, chunk)
                copies.append((r.matrix[name].at[place], r.matrix_s[name], None))
            for source, target, axes in copies:
                full = r.full.at[slot]
                plgpu.copy_gmem_to_smem(source, target.at[slot], full, collective_axes=axes)
            return none

        lax.fori_loop(0, unit.chunks, send, jnp.int32(0))

    def drain(n, none):
        plgpu.barrier_wait(r.free.at[lax.rem(n, p.stages)])
        return none

    sent = _each_unit(p, copy)
    lax.fori_loop(jnp.maximum(sent - p.stages, 0), sent, drain, jnp.int32(0))


def _place(piece: Piece, axis: int, out_row: Any, chunk: Any) -> tuple[Any, Any]:
    """Returns the place of a chunk's piece in its array, whose rows are on an axis."""
    size = piece.shape[1 - axis]
    first = pl.multiple_of(lax.div(chunk * CHUNK, piece.columns * size) * size, size)
    rows, own = pl.ds(out_row, TILE), pl.ds(first, size)
    return (own, rows) if axis else (rows, own)
