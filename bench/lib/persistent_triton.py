"""Multiplies a row with the matrices of layers in one launch, for bench.persistent_layers.

A program has every 132nd block of columns of each matrix. Between two products all programs meet.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array

NORM, PLAIN, GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EPS = tl.constexpr(1e-5)


@dataclass(frozen=True)
class Tile:
    """Describes the rows and columns of a matrix that a program loads at once."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Cut:
    """Holds the tiles of the four matrices."""

    qkv: Tile
    o: Tile
    gate_up: Tile
    down: Tile


def cut_for(width: int) -> Cut:
    """Returns tiles that fit into registers: of small layers few columns, for all to work."""
    if width < 2048:
        return Cut(Tile(1024, 8), Tile(1024, 8), Tile(1024, 16), Tile(2048, 8))
    return Cut(Tile(1024, 16), Tile(1024, 16), Tile(1024, 32), Tile(1024, 16))


def run_layers(
    layers: Any, x: Array, delta: Array, first: int, count: int, *, prefetch: bool
) -> tuple[Array, Array, Array]:
    """Returns the residual, what is to be added to it, and each program's times."""
    from jsparse.pallas_kernels.triton_call import triton_call

    width, inner = x.shape[-1], layers.down.shape[1]
    programs, cut = jax.local_devices()[0].core_count, cut_for(width)

    def row(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, size), x.dtype)

    outputs = (
        row(width),  # the residual after a layer
        row(width),  # what is to be added to it
        row(width),  # the residual in the middle of a layer
        row(layers.qkv.shape[2]),
        row(width),
        row(2 * inner),
        jax.ShapeDtypeStruct((count, 4, programs, 2), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    x, delta, *_, stamps, _ = triton_call(
        *(x, delta, *layers, jnp.full((1,), first, jnp.int32)),
        kernel=layers_kernel,
        out_shape=outputs,
        grid=(programs,),
        num_warps=16,
        num_stages=1,
        input_output_aliases={0: 0, 1: 1},
        zeroed_outputs=(7,),
        COUNT=count,
        PROGRAMS=programs,
        WIDTH=width,
        HEADS=layers.o.shape[1],
        QKV=layers.qkv.shape[2],
        INNER=inner,
        PREFETCH=prefetch,
        CUT=cut,
    )
    return x, delta, stamps


@triton.jit
def layers_kernel(
    x_in,
    delta_in,
    norms,  # [L, 2, WIDTH]
    qkv_matrices,  # [L, WIDTH, QKV]
    o_matrices,  # [L, HEADS, WIDTH]
    gate_up_matrices,  # [L, WIDTH, 2 · INNER]
    down_matrices,  # [L, INNER, WIDTH]
    first_layer,  # [1]
    x,  # [WIDTH], that of x_in
    delta,  # [WIDTH], that of delta_in
    middle,  # [WIDTH]
    qkv,  # [QKV]
    o,  # [WIDTH]
    gate_up,  # [2 · INNER]
    stamps,  # [COUNT, 4, PROGRAMS, 2]
    arrived,  # [1], zero
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    QKV: tl.constexpr,
    INNER: tl.constexpr,
    PREFETCH: tl.constexpr,
    CUT: tl.constexpr,
):
    """Runs COUNT layers from the first on."""
    layer = tl.load(first_layer)
    qkv_matrices += layer.to(tl.int64) * WIDTH * QKV
    o_matrices += layer.to(tl.int64) * HEADS * WIDTH
    gate_up_matrices += layer.to(tl.int64) * WIDTH * 2 * INNER
    down_matrices += layer.to(tl.int64) * INNER * WIDTH
    norms += layer * 2 * WIDTH
    QKV_TILE: tl.constexpr = CUT.qkv
    O_TILE: tl.constexpr = CUT.o
    GATE_UP_TILE: tl.constexpr = CUT.gate_up
    DOWN_TILE: tl.constexpr = CUT.down
    meetings = 0
    t1 = tile(qkv_matrices, tl.program_id(0), 0, WIDTH, QKV, QKV_TILE)
    for nth in range(COUNT):
        product(
            t1, x, delta, norms, middle, qkv_matrices, qkv, WIDTH, QKV, PROGRAMS, NORM, QKV_TILE
        )
        if PREFETCH:
            t2 = tile(o_matrices, tl.program_id(0), 0, HEADS, WIDTH, O_TILE)
        meetings = meet(arrived, meetings, stamps, PROGRAMS)
        if not PREFETCH:
            t2 = tile(o_matrices, tl.program_id(0), 0, HEADS, WIDTH, O_TILE)
        product(t2, qkv, qkv, norms, middle, o_matrices, o, HEADS, WIDTH, PROGRAMS, PLAIN, O_TILE)
        if PREFETCH:
            t3 = tile(gate_up_matrices, tl.program_id(0), 0, WIDTH, 2 * INNER, GATE_UP_TILE)
        meetings = meet(arrived, meetings, stamps, PROGRAMS)
        if not PREFETCH:
            t3 = tile(gate_up_matrices, tl.program_id(0), 0, WIDTH, 2 * INNER, GATE_UP_TILE)
        product(
            *(t3, middle, o, norms + WIDTH, x, gate_up_matrices, gate_up),
            *(WIDTH, 2 * INNER, PROGRAMS, NORM, GATE_UP_TILE),
        )
        if PREFETCH:
            t4 = tile(down_matrices, tl.program_id(0), 0, INNER, WIDTH, DOWN_TILE)
        meetings = meet(arrived, meetings, stamps, PROGRAMS)
        if not PREFETCH:
            t4 = tile(down_matrices, tl.program_id(0), 0, INNER, WIDTH, DOWN_TILE)
        product(
            *(t4, gate_up, gate_up, norms, middle, down_matrices, delta),
            *(INNER, WIDTH, PROGRAMS, GATE, DOWN_TILE),
        )
        if nth + 1 < COUNT:
            norms += 2 * WIDTH
            qkv_matrices += WIDTH * QKV
            o_matrices += HEADS * WIDTH
            gate_up_matrices += WIDTH * 2 * INNER
            down_matrices += INNER * WIDTH
        if PREFETCH:  # past the last layer once more of that, for nothing
            t1 = tile(qkv_matrices, tl.program_id(0), 0, WIDTH, QKV, QKV_TILE)
        meetings = meet(arrived, meetings, stamps, PROGRAMS)
        if not PREFETCH:
            t1 = tile(qkv_matrices, tl.program_id(0), 0, WIDTH, QKV, QKV_TILE)


@triton.jit
def product(
    numbers,  # the first tile of the program's first block
    x,
    delta,
    scale,
    total,
    matrix,
    out,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
):
    """Multiplies a row with the program's columns of a matrix."""
    ROWS: tl.constexpr = CUT.rows
    COLUMNS: tl.constexpr = CUT.columns
    row = tl.arange(0, ROWS)
    for block in range(tl.program_id(0), tl.cdiv(N, COLUMNS), PROGRAMS):
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for first in tl.range(0, WIDTH, ROWS, num_stages=1, loop_unroll_factor=3):
            given = load(x, first + row, WIDTH)
            if KIND == NORM:
                whole = (given + load(delta, first + row, WIDTH)).to(x.dtype.element_ty)
                if block == 0:
                    tl.store(total + first + row, whole, mask=first + row < WIDTH)
                inside = first + row < WIDTH
                weights = tl.load(scale + first + row, mask=inside, other=0).to(tl.float32)
                squares += whole.to(tl.float32) * whole.to(tl.float32)
                given = whole.to(tl.float32) * weights
            if KIND == GATE:
                gated = given / (1 + tl.exp(-given)) * load(x + WIDTH, first + row, WIDTH)
                given = gated.to(x.dtype.element_ty).to(tl.float32)
            sums += numbers.to(tl.float32) * given[:, None]
            # the next one of these columns, or the first of the next block's
            more = first + ROWS < WIDTH
            nth = tl.where(more, block, block + PROGRAMS)
            numbers = tile(matrix, nth, tl.where(more, first + ROWS, 0), WIDTH, N, CUT)
        y = tl.sum(sums, 0)
        if KIND == NORM:
            y *= tl.rsqrt(tl.sum(squares, 0) / WIDTH + EPS)
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(out + column, y.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def tile(matrix, block, first, WIDTH: tl.constexpr, N: tl.constexpr, CUT: tl.constexpr):
    """Loads rows from a first one on of a block of columns."""
    nth = first + tl.arange(0, CUT.rows)
    column = block * CUT.columns + tl.arange(0, CUT.columns)
    at = matrix + nth.to(tl.int64)[:, None] * N + column[None, :]
    return tl.load(at, mask=(nth < WIDTH)[:, None] & (column < N)[None, :], other=0)


@triton.jit
def load(x, nth, WIDTH: tl.constexpr):
    """Loads some numbers that other programs may have stored, past the multiprocessor's cache."""
    return tl.load(x + nth, mask=nth < WIDTH, other=0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def meet(arrived, meetings, stamps, PROGRAMS: tl.constexpr):
    """Waits until all programs have arrived, and stores when this one did, and when it went on."""
    at = stamps + (meetings * PROGRAMS + tl.program_id(0)) * 2
    tl.debug_barrier()
    tl.store(at, nanoseconds())
    tl.atomic_add(arrived, 1, sem="release")
    while tl.load(arrived, volatile=True) < (meetings + 1) * PROGRAMS:
        pass
    tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()
    tl.store(at + 1, nanoseconds())
    return meetings + 1


@triton.jit
def nanoseconds():
    """Returns the lower half of the GPU's clock."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
