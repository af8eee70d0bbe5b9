"""The copying (producer) warpgroup, which sends a unit's queries and listed blocks by TMA."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jsparse.pallas_kernels.block_sparse_prefill.lists import Unit
from jsparse.pallas_kernels.block_sparse_prefill.problem import (
    HALVES,
    ROWS,
    WARPS,
    GlobalRefs,
    Problem,
    SharedRefs,
)


def produce(
    p: Problem, g: GlobalRefs, s: SharedRefs, unit: Unit, listed: Callable[[Any], Any]
) -> None:
    """Sends the queries, then K and V of every listed block, of which each warp copies a part.

    `listed` returns the number of the nth block.
    """
    for half in range(HALVES):
        tokens = pl.ds(pl.multiple_of(unit.token + half * ROWS, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(g.q.at[unit.row, tokens, unit.head], s.q_s.at[half], s.q_full)
    plgpu.warp_map(lambda warp: _send(p, g, s, unit, listed, warp))


def _send(
    p: Problem,
    g: GlobalRefs,
    s: SharedRefs,
    unit: Unit,
    listed: Callable[[Any], Any],
    warp: Any,
) -> None:
    """Sends one warp's pieces of all blocks.

    Pages are looked up a block ahead, and the block's number two ahead, since each of these loads
    takes longer than a copy takes to start.
    """
    size, a_page = p.piece, p.page_size // p.piece
    pieces = [warp + WARPS * i for i in range(p.pieces // WARPS)]
    pair = unit.row * p.kv_heads + lax.div(unit.head, p.heads // p.kv_heads)
    # pages past the newest token's are not read: a table need not have them
    newest = lax.div(jnp.maximum(unit.newest, 0), p.page_size)

    def block(nth: Any) -> Any:
        return listed(jnp.minimum(nth, unit.blocks - 1))

    def source(piece: Any) -> Any:
        page = jnp.minimum(lax.div(piece, a_page), newest)
        page = g.table[pair, page] if p.has_table else pair * p.pages + page
        return page * a_page + lax.rem(piece, a_page)

    def sources(number: Any) -> tuple[Any, ...]:
        return tuple(source(number * p.pieces + piece) for piece in pieces)

    def send(nth: Any, ahead: Any) -> Any:
        here, following = ahead
        ahead = sources(following), block(nth + 2)
        slot = lax.rem(nth, p.stages)
        for pool, target, full, free in (
            (g.k, s.k_s, s.k_full, s.k_free),
            (g.v, s.v_s, s.v_full, s.v_free),
        ):

            @pl.when(nth >= p.stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[slot])

            for source_piece, piece in zip(here, pieces, strict=True):
                to = target.at[slot, pl.ds(piece * size, size)]
                plgpu.copy_gmem_to_smem(pool.at[source_piece], to, full.at[slot])
        return ahead

    def drain(nth: Any, none: Any) -> Any:
        for free in (s.k_free, s.v_free):
            plgpu.barrier_wait(free.at[lax.rem(nth, p.stages)])
        return none

    lax.fori_loop(0, unit.blocks, send, (sources(block(0)), block(1)))
    # a program may not end before the last phase of a barrier that it waits for
    lax.fori_loop(jnp.maximum(unit.blocks - p.stages, 0), unit.blocks, drain, jnp.int32(0))
