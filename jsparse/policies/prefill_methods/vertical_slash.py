"""Attends along vertical lines, tokens that all queries need, and slashes, distances they need.

Paper: "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention"
(Jiang et al.), arXiv:2407.02490: its vertical-slash pattern, with the A-shape's first and newest
tokens. Each head gets the lines that its own queries have most of their attention on.

Where we differ: the paper estimates the lines of a whole prompt from its last 64 queries; here each
block of 128 queries has lines of its own, from its last queries, so that they do not depend on how
a prompt is cut into chunks or on later text. Lines are rounded to blocks of 128 keys.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.builder import builder
from jsparse.hooks import ChunkView
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.block_sparse_prefill.segments import (
    BLOCK,
    blocks_per_segment,
    num_segments,
    segment,
)
from jsparse.policies.prefill_methods.streaming import sink_and_recent
from jsparse.policy import PrefillMethod
from jsparse.selection.threshold import top_k_mask


class Lines(NamedTuple):
    """The attention of the strongest line in each key block.

    Attributes:
        vertical: the most attention that one key of the block gets.
        slash: the most attention along one diagonal that meets the newest query in the block.
    """

    vertical: Float32[Array, "B N QB KB"]
    slash: Float32[Array, "B N QB KB"]


@builder
def vertical_slash(
    sink: int = 128, recent: int = 1024, vertical: int = 2048, slash: int = 2048, queries: int = 4
) -> PrefillMethod:
    """Attends to the strongest lines, the first `sink` tokens and at least the last `recent`.

    Args:
        sink: the first tokens of a row, rounded up to whole blocks.
        recent: the newest tokens of each query, its own included, rounded up to whole blocks.
        vertical: the tokens in the blocks with the strongest vertical lines, per query head.
        slash: the distances in the blocks with the strongest slashes; each adds the block before.
        queries: the newest queries of each block of 128 that estimate its lines.
    """
    for name, value in (("sink", sink), ("vertical", vertical), ("slash", slash)):
        whole_number(name, value, 0)
    whole_number("recent", recent, 1)
    whole_number("queries", queries, 1)
    if queries > BLOCK:
        raise ValueError(f"queries={queries}: must be at most {BLOCK}, the queries of a block")
    counts = -(-vertical // BLOCK), -(-slash // BLOCK)
    return PrefillMethod(partial(score, queries), partial(choose, sink, recent, *counts))


def score(queries: int, view: ChunkView) -> Lines:
    """Sums the attention of each block's newest queries along columns and diagonals.

    Logits have the queries' dtype.
    """
    q, kv, valid = view
    batch, tokens, heads, head_dim = q.shape
    kv_heads, (query_blocks, key_blocks) = kv.lengths.shape[1], view.num_blocks
    start = BLOCK * jnp.arange(query_blocks, dtype=jnp.int32)
    end = start + jnp.clip(valid[:, None] - start, 0, BLOCK)  # a prompt's last block may have few
    at = end[..., None] + jnp.arange(-queries, 0, dtype=jnp.int32)
    newest = q[jnp.arange(batch)[:, None, None], jnp.clip(at, 0, tokens - 1)]
    newest = newest.reshape(*newest.shape[:3], kv_heads, -1, head_dim).transpose(0, 3, 1, 4, 2, 5)
    # a query that is not the block's sees no key
    position = jnp.where(at >= start[:, None], view.first[:, None, None] + at, -1)
    size = blocks_per_segment(newest.size // head_dim * BLOCK, key_blocks)
    width = size * BLOCK

    def logits(nth: Int32[Array, ""]) -> Float32[Array, "B K QB G queries s"]:
        keys = segment(kv.k, kv, nth * size, size)
        found = jnp.einsum("bkigqh,bksh->bkigqs", newest, keys).astype(jnp.float32)
        slots = nth * width + jnp.arange(width, dtype=jnp.int32)
        seen = (slots <= position[..., None])[:, None, :, None]
        return jnp.where(seen, head_dim**-0.5 * found, -jnp.inf)

    def add(nth: Int32[Array, ""], total: Array) -> Array:
        return jnp.logaddexp(total, jax.nn.logsumexp(logits(nth), axis=-1))

    def strongest(nth: Int32[Array, ""], found: tuple[Lines, Array]) -> tuple[Lines, Array]:
        lines, before = found
        weights = jnp.exp(logits(nth) - total[..., None])
        joined = jnp.concatenate([before, weights], axis=-1)
        diagonals = reduce(jnp.add, (joined[..., row, row : row + width] for row in range(queries)))
        new = Lines(*(_by_block(line) for line in (weights.sum(-2), diagonals)))
        lines = jax.tree.map(
            lambda line, part: jax.lax.dynamic_update_slice_in_dim(line, part, nth * size, -1),
            lines,
            new,
        )
        return lines, weights[..., width - queries + 1 :]

    segments, rows = num_segments(kv, size), newest.shape[:-1]
    total = jax.lax.fori_loop(0, segments, add, jnp.full(rows, -jnp.inf, jnp.float32))
    total = jnp.where(total > -jnp.inf, total, 0.0)
    none = jnp.zeros((*rows[:-1], -(-key_blocks // size) * size), jnp.float32)
    before = jnp.zeros((*rows, queries - 1), jnp.float32)
    lines, _ = jax.lax.fori_loop(0, segments, strongest, (Lines(none, none), before))
    shape = batch, heads, query_blocks, key_blocks
    return Lines(*(line[..., :key_blocks].swapaxes(2, 3).reshape(shape) for line in lines))


def _by_block(line: Float32[Array, "*rows s"]) -> Float32[Array, "*rows KB"]:
    return line.reshape(*line.shape[:-1], -1, BLOCK).max(-1)


def choose(
    sink: int, recent: int, vertical: int, slash: int, scores: Lines, view: ChunkView
) -> Bool[Array, "B N QB KB"]:
    """Chooses the blocks that hold one of the lines for any query of the block."""
    columns, ends = (
        top_k_mask(jnp.where(line > 0, line, -jnp.inf), count)
        for line, count in ((scores.vertical, vertical), (scores.slash, slash))
    )
    # 127 queries earlier, a diagonal has moved into the block before
    diagonals = ends | jnp.pad(ends[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    return columns | diagonals | sink_and_recent(sink, recent, view)
