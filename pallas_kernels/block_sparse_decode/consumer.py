# pyright: reportCallIssue=false, reportPrivateImportUsage=false
"""The warpgroup that multiplies."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, memref

from jsparse.pallas_kernels.block_sparse_decode import schedule
from jsparse.pallas_kernels.block_sparse_decode.problem import WORD, M, Problem

LOG2_E = 1.4426950408889634
NOTHING = -1e30  # the running maximum before any token


def consume(p: Problem, g: dict, s: dict) -> None:
    """Attention over the tiles that come, run by run, until one of no splits."""
    stages, tokens, width = p.tiles.stages, p.tiles.tokens, min(p.page_size, WORD)
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    ops = (_dot, _add_dot, _assign_row) if p.interpret else (_wgmma, _add_wgmma, _store_row)
    product, add_product, store_row = ops
    team = lax.axis_index("warpgroup")

    def across(x, like):
        return lax.broadcast_in_dim(x, like.shape, [0])

    def receive(n):
        slot = team * p.runs + lax.rem(n, p.runs)
        plgpu.barrier_wait(s["run_full"].at[slot])
        plgpu.barrier_wait(s["q_full"].at[slot])
        return s["run_s"][slot, 2]

    def run(carry):
        n, end = carry
        run_slot = team * p.runs + lax.rem(n, p.runs)
        h, begin, _, num_tiles, splits, extra, sent = (s["run_s"][run_slot, i] for i in range(7))
        first_tile = schedule.bounds(num_tiles, splits, begin)[0]

        def tile(i, carry):
            acc, top, total = carry
            slot = lax.rem(sent + i - first_tile, stages)
            at = team * stages + slot
            plgpu.barrier_wait(s["k_full"].at[at])
            column = plgpu.broadcasted_iota(jnp.int32, (tokens,), 0, layout=by_column)
            word = s["words_s"][at, 0]
            for w in range(1, tokens // width):
                word = jnp.where(column >= w * width, s["words_s"][at, w], word)
            attended = (lax.shift_right_logical(word, lax.rem(column, width)) & 1) == 1
            logits = product(s["q_s"].at[pl.ds(pl.multiple_of(run_slot * p.rows, 8), M)], s["k_s"].at[team, slot])
            plgpu.barrier_arrive(s["k_free"].at[at])
            attended = lax.broadcast_in_dim(attended, logits.shape, [1])
            logits = jnp.where(attended, logits * (p.scale * LOG2_E), -jnp.inf)
            if p.logits:
                store_row(g["logits"].at[h, pl.ds(i * tokens, tokens)], logits * (1 / LOG2_E))
            new_top = jnp.maximum(top, logits.max(axis=1))
            weights = jnp.exp2(logits - across(new_top, logits))
            decay = jnp.exp2(top - new_top)
            total = total * decay + weights.sum(axis=1)
            acc = acc * across(decay, acc)
            weights = weights.astype(p.dtype)
            plgpu.barrier_wait(s["v_full"].at[at])
            acc = add_product(acc, weights, s["v_s"].at[team, slot])
            plgpu.barrier_arrive(s["v_free"].at[at])
            return acc, new_top, total

        def split(nth, _):
            t0, t1 = schedule.bounds(num_tiles, splits, nth)
            nothing = (
                plgpu.layout_cast(jnp.full((M, p.head_dim), 0.0, jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((M,), NOTHING, jnp.float32), by_row),
                plgpu.layout_cast(jnp.full((M,), 0.0, jnp.float32), by_row),
            )
            acc, top, total = lax.fori_loop(t0, t1 + jnp.where(nth == splits - 1, extra, 0), tile, nothing)
            empty = total == 0.0
            inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s["o_s"][team] = acc * across(inverse, acc)
            s["lse_s"][team] = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) / LOG2_E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s["o_s"].at[team, pl.ds(0, p.rows)], g["o"].at[h, nth])
            plgpu.copy_smem_to_gmem(s["lse_s"].at[team, pl.ds(0, p.rows)], g["lse"].at[h, nth])
            return _

        lax.fori_loop(begin, end, split, jnp.int32(0))
        plgpu.barrier_arrive(s["run_free"].at[run_slot])
        return n + 1, receive(n + 1)

    zero = jnp.int32(0)
    lax.while_loop(lambda carry: carry[1] > 0, run, (zero, receive(zero)))
    plgpu.wait_smem_to_gmem(0)


def _wgmma(q_s, k_s):
    """q·kᵀ, float32[M, tokens], on tensor cores."""

    def product(acc):
        plgpu.wgmma(acc, q_s, k_s.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((q_s.shape[0], k_s.shape[0]), jnp.float32))


def _add_wgmma(acc, weights, v_s):
    """Acc + weights·v, float32[M, H], on tensor cores."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v_s))(plgpu.ACC.init(acc))


def _dot(q_s, k_s):
    """What `_wgmma` gives, for the interpreter, which has no tensor cores."""
    return jnp.dot(q_s[...], k_s[...].T, preferred_element_type=jnp.float32)


def _add_dot(acc, weights, v_s):
    """What `_add_wgmma` gives."""
    return acc + jnp.dot(weights, v_s[...], preferred_element_type=jnp.float32)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
def _store_row(_, row_ref, x):
    """Stores row 0 of x, which is the mean query's, by the four threads that hold it."""

    def store(value, index):
        row, column = index
        first = arith.cmpi(arith.CmpIPredicate.eq, row, arith.constant(row.type, 0))
        with mgpu.when(first):
            memref.store(value, row_ref, [column])

    x.foreach(store)


def _assign_row(row_ref, x):
    """What `_store_row` does."""
    row_ref[...] = x[0]
