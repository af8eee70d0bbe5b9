# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Implements `api.quantized_product` with Mosaic GPU for at most 16 rows, for Hopper.

One persistent launch. A unit of work is 64 rows of the matrix over a part of its columns. One
warpgroup copies: chunks of columns by TMA, as many ahead as shared memory holds. The others take
chunks in turn, widen their integers to bfloat16, which is exact, and multiply them with x in the
tensor cores: a product for each block of 32 columns, whose sums in float32 are multiplied with the
blocks' scales. So only sums are rounded. A row of x has the same bits whichever others there are,
but not those of other backends.
"""

from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import memref, vector
from jaxtyping import Array, Float, Float32

from jsparse.pallas_kernels.mosaic_registers import below, index, plus, position
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
    sums = _kernel(problem)(x, matrix["values"], matrix["scales"])
    # one by one: in what order XLA's own sum adds them can depend on the number of rows
    return reduce(add, [sums[part] for part in range(parts)])


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


class Refs(NamedTuple):
    """Names a launch's arrays, and a program's shared memory and barriers, in their order.

    What a warpgroup fills another frees. A slot's nth use is its barriers' nth phase.
    """

    x: Any  # [rows, in]
    values: Any  # [out, in]
    scales: Any  # [in / 32, out]
    out: Any  # [parts, rows, out]: each part's sums
    x_s: Any  # [padded, part_columns]
    values_s: Any  # [stages, ROWS, columns]
    scales_s: Any  # [stages, columns / 32, ROWS]
    sums_s: Any  # [turns - 1, ROWS, padded]: of the warpgroups but the first
    x_full: Any  # the part's columns of x are there
    full: Any  # [stages]: values and scales of a chunk are there
    free: Any  # [stages]: they are used
    sums_full: Any  # all but the first have stored their sums
    sums_free: Any  # the first has added them to its own


def tiled(width: int, nbytes: int) -> tuple[Any, ...]:
    """Returns how shared memory keeps tiles of 8 rows, swizzled over their width."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * nbytes)


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

    others = max(p.turns - 1, 1)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.parts, p.rows, p.out), jnp.float32),
        scratch_types=[
            plgpu.SMEM((p.padded, p.part_columns), jnp.bfloat16, transforms=tiled(BLOCK, 2)),
            plgpu.SMEM((p.stages, ROWS, p.columns), jnp.int8, transforms=tiled(128, 1)),
            plgpu.SMEM((p.stages, p.columns // BLOCK, ROWS), jnp.float16),
            plgpu.SMEM((others, ROWS, p.padded), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=p.stages),
            plgpu.Barrier(num_barriers=p.stages),
            plgpu.Barrier(num_arrivals=others),
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
    """Returns the part that all units of a program have, and their number."""
    block = lax.axis_index("block")
    return lax.rem(block, p.parts), lax.div(p.units - block + p.blocks - 1, p.blocks)


def _rows_of(p: Problem, unit: Any) -> Any:
    """Returns the rows of the matrix that a program's nth unit has."""
    tile = lax.div(lax.axis_index("block") + unit * p.blocks, p.parts)
    return pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)


def _multiply(p: Problem, r: Refs, warpgroup: Any) -> None:
    """Multiplies the chunks that are this warpgroup's turn; the first stores the sums of all."""
    part, units = _share(p)
    multiply, store = (_dots, _store) if p.interpret else (_wgmmas, store_registers)
    plgpu.barrier_wait(r.x_full)

    def add_chunk(unit, at, acc):
        slot = lax.rem(unit * p.chunks + at, p.stages)
        plgpu.barrier_wait(r.full.at[slot])
        products = multiply(r.values_s.at[slot], r.x_s, at * (p.columns // BLOCK))
        for nth, product in enumerate(products):
            scale = _load(p, r.scales_s.at[slot, nth], plgpu.Layout.WGMMA.reduce(1))
            scale = lax.broadcast_in_dim(scale.astype(jnp.float32), acc.shape, [0])
            acc = acc + product * scale
        plgpu.barrier_arrive(r.free.at[slot])
        return acc

    def unit(nth, none):
        # of all of a program's chunks every p.turns-th, so that a slot of shared memory is always
        # the same warpgroup's, which counts the phases of its barriers
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
    """Copies the part's columns of x, and then chunk after chunk into slots that are free.

    Rows and columns past the end become 0, of values and scales, too.
    """
    part, units = _share(p)
    sent, blocks = units * p.chunks, p.columns // BLOCK
    first_column = pl.multiple_of(part * p.part_columns, p.part_columns)
    own = r.x.at[pl.ds(part * 0, p.padded), pl.ds(first_column, p.part_columns)]
    plgpu.copy_gmem_to_smem(own, r.x_s, r.x_full)

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
def store_registers(_, out, sums) -> None:  # [rows, ROWS], [ROWS, padded]
    """Stores the rows of x that count, which are columns of the sums."""
    row, column = position()
    # parts[i, half]: columns 8 i + column and the next, of the row that lies 8 · half below
    for i, parts in enumerate(sums.registers.reshape(-1, 2)):
        for half, part in enumerate(parts):
            at = index(plus(row, 8 * half))
            for one in range(2):
                own = plus(column, 8 * i + one)
                with mgpu.when(below(own, out.type.shape[0])):
                    memref.store(vector.extract(part, [], [one]), out, [index(own), at])
