"""The multiplying (consumer) warpgroup.

wgmma needs 64 rows but allows 8 columns. A head has few queries, so they are the columns, and
tokens or channels are the rows: logits are K·qᵀ, the output is Vᵀ·weights.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jsparse.pallas_kernels.block_sparse_decode import schedule
from jsparse.pallas_kernels.block_sparse_decode.problem import WORD, Problem
from jsparse.pallas_kernels.block_sparse_decode.refs import GlobalRefs, SharedRefs
from jsparse.pallas_kernels.block_sparse_decode.registers import LOG2_E, operations
from jsparse.pallas_kernels.block_sparse_decode.schedule import TOKENS

NOTHING = -1e30  # the running maximum before any token; finite, so that no difference is NaN


def consume(
    p: Problem,
    g: GlobalRefs,
    s: SharedRefs,
) -> None:
    """Attends to the tiles that the producer sends, run by run, until a run has no splits."""
    stages, tokens, width = p.tiles.stages, TOKENS, min(p.page_size, WORD)
    by_token, by_query = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    do = operations(p)
    team = lax.axis_index("warpgroup")

    def down(x, like):
        return lax.broadcast_in_dim(x, like.shape, [1])

    def receive(n):  # the end split of the nth run; 0 if the producer has finished
        slot = team * p.runs + lax.rem(n, p.runs)
        plgpu.barrier_wait(s.run_full.at[slot])
        plgpu.barrier_wait(s.q_full.at[slot])
        return s.run_s[slot, 2]

    def run(carry):
        n, end = carry
        run_slot = team * p.runs + lax.rem(n, p.runs)
        h, begin, _, num_tiles, splits, extra, sent = (s.run_s[run_slot, i] for i in range(7))
        first_tile = schedule.bounds(num_tiles, splits, begin)[0]

        def tile(i, carry):
            acc, top, sums = carry
            slot = lax.rem(sent + i - first_tile, stages)
            at = team * stages + slot
            plgpu.barrier_wait(s.k_full.at[at])
            # 32 tokens share a word of bits, or a page does if it is smaller
            token = plgpu.broadcasted_iota(jnp.int32, (tokens,), 0, layout=by_token)
            word = s.words_s[at, 0]
            for w in range(1, tokens // width):
                word = jnp.where(token >= w * width, s.words_s[at, w], word)
            attended = (lax.shift_right_logical(word, lax.rem(token, width)) & 1) == 1
            logits = do.product(s.k_s.at[team, slot], s.q_s.at[run_slot])
            logits = logits * (p.scale * LOG2_E)  # base 2, for exp2 below
            if p.has_bias:
                logits = do.add_bias(s.bias_s.at[team, slot], logits)
            # K, bias and words have been read: the slot may be refilled while V is in use
            plgpu.barrier_arrive(s.k_free.at[at])
            logits = jnp.where(lax.broadcast_in_dim(attended, logits.shape, [0]), logits, -jnp.inf)
            if p.logits:
                row = g.logits.at[h, pl.ds(i * tokens, tokens)]
                do.store_column(row, s.run_s.at[run_slot], logits * (1 / LOG2_E))
            # online softmax: scale earlier sums by 2^(old maximum - new maximum)
            new_top = jnp.maximum(top, do.over_tokens("max", logits, s.reduced_s.at[team, 0]))
            weights = jnp.exp2(logits - down(new_top, logits))
            decay = jnp.exp2(top - new_top)
            sums = sums * down(decay, sums) + weights
            acc = acc * down(decay, acc)
            do.store_weights(s.weights_s.at[team], weights.astype(p.dtype))
            plgpu.commit_smem()
            plgpu.barrier_wait(s.v_full.at[at])
            acc = do.add_product(acc, s.v_s.at[team, slot], s.weights_s.at[team])
            plgpu.barrier_arrive(s.v_free.at[at])
            return acc, new_top, sums

        def split(nth, _):
            t0, t1 = schedule.bounds(num_tiles, splits, nth)

            def full(shape, value, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            nothing = (
                full((p.head_dim, p.columns), 0.0, plgpu.Layout.WGMMA),
                full((p.columns,), NOTHING, by_query),
                # per token; reduced at the end
                full((tokens, p.columns), 0.0, plgpu.Layout.WGMMA),
            )
            # the last split also takes the extra tile, which has only the newest page
            acc, top, sums = lax.fori_loop(
                t0, t1 + jnp.where(nth == splits - 1, extra, 0), tile, nothing
            )
            total = do.over_tokens("add", sums, s.reduced_s.at[team, 1])
            empty = total == 0.0
            inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
            lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) / LOG2_E)
            acc = acc * down(inverse, acc)
            do.store_columns(g.o.at[h, nth], g.lse.at[h, nth], s.run_s.at[run_slot], acc, lse)
            return _

        lax.fori_loop(begin, end, split, jnp.int32(0))
        plgpu.barrier_arrive(s.run_free.at[run_slot])
        return n + 1, receive(n + 1)

    zero = jnp.int32(0)
    lax.while_loop(lambda carry: carry[1] > 0, run, (zero, receive(zero)))
