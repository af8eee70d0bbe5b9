"""Implements `api.quantized_product` with jax-triton for a few rows, without tensor cores.

A program has some rows of the matrix and all of their columns. Integers are widened to float32, and
what a thread has of a block is multiplied with the block's scale before anything is added across
threads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks

OUT, COLUMNS, NUM_WARPS, STAGES = 16, 512, 4, 3


def quantized_product(
    x: Float[Array, "rows in"],
    matrix: Blocks,
    *,
    dtype: Any,
    out_rows: int = OUT,
    columns: int = COLUMNS,
    num_warps: int = NUM_WARPS,
    stages: int = STAGES,
) -> Float[Array, "rows out"]:
    """Implements `api.quantized_product` with jax-triton.

    The integers from `out_rows` on override what was measured best.
    """
    from jsparse.pallas_kernels.triton_call import triton_call

    values, scales = matrix["values"], matrix["scales"]
    out, width = values.shape
    return triton_call(
        *(x, values, scales),
        kernel=product_kernel,
        out_shape=jax.ShapeDtypeStruct((len(x), out), jnp.dtype(dtype)),
        grid=(triton.cdiv(out, out_rows),),
        num_warps=num_warps,
        num_stages=stages,
        ROWS=len(x),
        N=out,
        WIDTH=width,
        OUT=out_rows,
        COLUMNS=columns,
        BLOCKS=columns // BLOCK,
        STAGES=stages,
    )


@triton.jit
def product_kernel(
    x_ptr,  # [ROWS, WIDTH]
    values_ptr,  # [N, WIDTH]
    scales_ptr,  # [WIDTH / 32, N]
    out_ptr,  # [ROWS, N]
    ROWS: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiplies OUT rows of the matrix with all rows of x."""
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    there = (n < N)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    block = tl.arange(0, BLOCKS)[None, :]
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((OUT, BLOCKS), tl.float32),)
    for first in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        inside = first + column < WIDTH
        at = n.to(tl.int64)[:, None] * WIDTH + first + column
        values = tl.load(values_ptr + at, mask=there & inside, other=0).to(tl.float32)
        nth = first // 32 + block
        scales = tl.load(
            scales_ptr + nth * N + n[:, None], mask=there & (nth * 32 < WIDTH), other=0
        ).to(tl.float32)
        more = ()
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * WIDTH + first + column, mask=inside, other=0)
            terms = tl.reshape(values * x.to(tl.float32), (OUT, BLOCKS, 32))
            more += (sums[row] + tl.sum(terms, 2) * scales,)
        sums = more
    for row in tl.static_range(ROWS):
        y = tl.sum(sums[row], 1)
        tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
