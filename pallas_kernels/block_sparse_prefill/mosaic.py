"""Implements `api.block_sparse_prefill` with Mosaic GPU, for Hopper.

A program takes 128 queries of one head. One warpgroup copies the blocks that they list, page by
page (`producer`), and two multiply them by 64 queries each (`consumer`). The longest units start
first (`lists`), and the GPU starts the next one as soon as a program ends.
"""

from functools import cache
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_prefill.consumer import consume
from jsparse.pallas_kernels.block_sparse_prefill.lists import Unit, lists
from jsparse.pallas_kernels.block_sparse_prefill.problem import (
    BLOCK,
    HALVES,
    GlobalRefs,
    Problem,
    SharedRefs,
    shared_types,
)
from jsparse.pallas_kernels.block_sparse_prefill.producer import produce
from jsparse.shapes import ChunkQueries, Rows


def block_sparse_prefill(
    q: ChunkQueries,
    kv: LayerCache,
    valid: Rows,
    chosen: Bool[Array, "B N QB KB"] | None = None,
    *,
    stages: int = 3,
    interpret: bool = False,
) -> ChunkQueries:
    """Implements `api.block_sparse_prefill` with Mosaic GPU.

    `interpret` runs the kernel on any machine, slowly, for tests, and prints the races that it
    detects.
    """
    (batch, tokens, heads, head_dim), kv_heads = q.shape, kv.lengths.shape[1]
    # without a table a head's slots are adjacent, so its pages may have any size
    page_size = gcd(kv.capacity, BLOCK) if kv.block_table is None else kv.page_size
    query_blocks = -(-tokens // BLOCK)
    padded = query_blocks * BLOCK
    problem = Problem(
        batch=batch,
        tokens=padded,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages=kv.capacity // page_size,
        has_table=kv.block_table is not None,
        stages=stages,
        dtype=q.dtype,
        interpret=interpret,
    )
    k, v = (pool.reshape(-1, problem.piece, head_dim) for pool in kv.arrays)
    q = jnp.pad(q, ((0, 0), (0, padded - tokens), (0, 0), (0, 0)))
    blocks = query_blocks, -(-kv.capacity // BLOCK)
    work = lists(chosen, kv.lengths[:, 0], valid, heads, *blocks)
    tables = () if kv.block_table is None else (kv.block_table.reshape(batch * kv_heads, -1),)
    return _kernel(problem)(q, k, v, *work, *tables)[:, :tokens]


@cache
def _kernel(p: Problem):
    """Builds the launch, which returns o."""

    def body(*refs, **scratch):
        g, s, nth = GlobalRefs.of(p, refs), SharedRefs(**scratch), lax.axis_index("unit")
        unit = Unit(*(g.units[nth, i] for i in range(len(Unit._fields))))

        def listed(at: Any) -> Any:
            return g.ids[nth, at]

        # twice 128 threads with 232 registers and 128 with 40 use 64,512 of 65,536
        @pl.when(lax.axis_index("warpgroup") < HALVES)
        def _():
            plgpu.set_max_registers(232, action="increase")
            consume(p, g, s, unit, listed)

        @pl.when(lax.axis_index("warpgroup") == HALVES)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            produce(p, g, s, unit, listed)

    body.__name__ = "block_sparse_prefill"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.batch, p.tokens, p.heads, p.head_dim), p.dtype),
        scratch_types=shared_types(p),
        grid=(p.units,),
        grid_names=("unit",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if p.interpret else None,
    )
