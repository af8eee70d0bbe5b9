"""The two multiplying (consumer) warpgroups, which take 64 queries of a unit each.

They take turns to issue products: while the tensor cores multiply for one, the other computes its
softmax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jsparse.pallas_kernels.block_sparse_prefill.lists import Unit
from jsparse.pallas_kernels.block_sparse_prefill.problem import (
    BLOCK,
    ROWS,
    GlobalRefs,
    Problem,
    SharedRefs,
)
from jsparse.pallas_kernels.block_sparse_prefill.products import products, zeros

LOG2_E = 1.4426950408889634
NOTHING = -1e30  # the running maximum before any key; finite, so that no difference is NaN
BY_QUERY = plgpu.Layout.WGMMA.reduce(1)
MASKED = 2  # blocks at the end of a list that queries may not reach the ends of


class Softmax(NamedTuple):
    """An online softmax in base 2: of the blocks so far, relative to their largest logits."""

    o: Any  # [rows, H]
    top: Any  # [rows], the largest logit
    total: Any  # [rows], the sum of weights


def consume(
    p: Problem, g: GlobalRefs, s: SharedRefs, unit: Unit, listed: Callable[[Any], Any]
) -> None:
    """Attends from this warpgroup's queries to the listed blocks, and stores o.

    `listed` returns the number of the nth block.
    """
    half, do = lax.axis_index("warpgroup"), products(p)
    count = unit.blocks
    unmasked = jnp.maximum(count - MASKED, 0)
    ends = listed(unmasked), listed(count - 1)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_QUERY)
    reached = jnp.minimum(unit.first + half * ROWS + row, unit.newest)  # each query's last key
    q_s = s.q_s.at[half]

    def pass_turn() -> None:
        plgpu.barrier_arrive(s.turn.at[1 - half])

    def masked(nth: Any, scores: Any) -> Any:
        block = jnp.where(nth == count - 1, ends[1], ends[0])
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        seen = column <= lax.broadcast_in_dim(reached - block * BLOCK, scores.shape, [0])
        return jnp.where(seen, scores, -jnp.inf)

    def step(nth: Any, carry: Any, mask: bool) -> Any:
        so_far, scores = carry
        so_far, weights = _soften(p, so_far, masked(nth, scores) if mask else scores)
        here, following = lax.rem(nth, p.stages), lax.rem(nth + 1, p.stages)
        plgpu.barrier_wait(s.v_full.at[here])
        plgpu.barrier_wait(s.k_full.at[following])
        plgpu.barrier_wait(s.turn.at[half])
        v_s, k_s = s.v_s.at[here], s.k_s.at[following]
        o, scores = do.both(so_far.o, weights, v_s, q_s, k_s, pass_turn)
        plgpu.barrier_arrive(s.v_free.at[here])
        plgpu.barrier_arrive(s.k_free.at[following])
        return so_far._replace(o=o), scores

    plgpu.barrier_wait(s.q_full)
    plgpu.barrier_wait(s.k_full.at[0])
    pl.when(half == 1)(pass_turn)  # the other one begins
    plgpu.barrier_wait(s.turn.at[half])
    scores = do.logits(q_s, s.k_s.at[0], pass_turn)
    plgpu.barrier_arrive(s.k_free.at[0])
    top, total = (
        plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_QUERY) for x in (NOTHING, 0.0)
    )
    carry = Softmax(zeros(p.head_dim), top, total), scores
    carry = lax.fori_loop(0, unmasked, lambda nth, carry: step(nth, carry, False), carry)
    carry = lax.fori_loop(unmasked, count - 1, lambda nth, carry: step(nth, carry, True), carry)
    so_far, scores = carry
    so_far, weights = _soften(p, so_far, masked(count - 1, scores))
    last = lax.rem(count - 1, p.stages)
    plgpu.barrier_wait(s.v_full.at[last])
    plgpu.barrier_wait(s.turn.at[half])
    o = do.add_values(so_far.o, weights, s.v_s.at[last], lambda: pl.when(half == 0)(pass_turn))
    plgpu.barrier_arrive(s.v_free.at[last])
    _store(p, g, s, unit, half, o, so_far.total)


def _soften(p: Problem, so_far: Softmax, scores: Any) -> tuple[Softmax, Any]:
    """Returns the softmax with room for a block, whose values are still to be added, and weights.

    The weights have the type of V.
    """
    scale = p.head_dim**-0.5 * LOG2_E
    top = jnp.maximum(so_far.top, jnp.max(scores, axis=1) * scale)
    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(top, scores.shape, [0]))
    decay = jnp.exp2(so_far.top - top)
    total = so_far.total * decay + jnp.sum(weights, axis=1)
    o = so_far.o * lax.broadcast_in_dim(decay, so_far.o.shape, [0])
    # all of it is computed before the turn that follows, during which tensor cores would wait
    return lax.optimization_barrier((Softmax(o, top, total), weights.astype(p.dtype)))


def _store(p: Problem, g: GlobalRefs, s: SharedRefs, unit: Unit, half: Any, o: Any, total: Any):
    """Divides o by the sum of weights, and stores it through the queries' shared memory."""
    empty = total == 0.0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    o_s = s.q_s.at[half]
    o_s[...] = (o * lax.broadcast_in_dim(inverse, o.shape, [0])).astype(p.dtype)
    plgpu.commit_smem()
    tokens = pl.ds(pl.multiple_of(unit.token + half * ROWS, ROWS), ROWS)
    plgpu.copy_smem_to_gmem(o_s, g.o.at[unit.row, tokens, unit.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
