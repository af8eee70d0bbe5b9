"""Attends along vertical lines, tokens that all queries need, and slashes, distances they need.

Paper: "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention"
(Jiang et al.), arXiv:2407.02490: its vertical-slash pattern, with the A-shape's first and newest
tokens. Each head gets the lines that its own queries have most of their attention on.

Where we differ: the paper estimates the lines of a whole prompt from its last 64 queries; here each
block of 128 queries has lines of its own, from its last queries, so that they do not depend on how
a prompt is cut into chunks or on later text. Lines are rounded to blocks of 128 keys.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import read_heads
from jsparse.hooks import ChunkView
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.block_sparse_prefill import BLOCK
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
    sink: int = 128, recent: int = 1024, vertical: int = 2048, slash: int = 2048, queries: int = 16
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
    """Sums the attention of each block's newest queries along columns and diagonals."""
    q, kv, valid = view
    batch, tokens, heads, head_dim = q.shape
    query_blocks, key_blocks = view.num_blocks
    # padded to whole blocks
    keys = jnp.pad(
        read_heads(kv.k, kv), ((0, 0), (0, 0), (0, key_blocks * BLOCK - kv.capacity), (0, 0))
    )
    slots = jnp.arange(key_blocks * BLOCK, dtype=jnp.int32)
    by_key, row = jnp.arange(batch)[:, None], jnp.arange(queries, dtype=jnp.int32)

    def of_block(nth: Int32[Array, ""]) -> Lines:
        end = jnp.clip(valid - nth * BLOCK, 0, BLOCK)  # a prompt's last block may have few
        at = nth * BLOCK + end[:, None] - queries + row
        part = q[by_key, jnp.clip(at, 0, tokens - 1)]
        part = part.reshape(batch, queries, keys.shape[1], -1, head_dim)
        logits = jnp.einsum("brkgh,bksh->bkgrs", part, keys, preferred_element_type=jnp.float32)
        positions = view.first[:, None] + at
        logits = jnp.where(
            (slots <= positions[..., None])[:, None, None], head_dim**-0.5 * logits, -jnp.inf
        )
        real = (at >= nth * BLOCK)[:, None, None, :, None]
        weights = jnp.where(real, jax.nn.softmax(logits, axis=-1), 0.0)
        weights = weights.reshape(batch, heads, queries, -1)
        return Lines(*(_strongest(lines.sum(2)) for lines in (weights, _diagonals(weights))))

    lines = jax.lax.map(of_block, jnp.arange(query_blocks, dtype=jnp.int32))
    return Lines(*(jnp.moveaxis(line, 0, 2) for line in lines))


def _diagonals(weights: Float32[Array, "B N queries S"]) -> Float32[Array, "B N queries S"]:
    """Moves each query's keys by its distance to the newest: a diagonal becomes a column."""
    *heads, queries, size = weights.shape
    rows = jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (queries - 1, 0)))
    # a row of one entry more moves each row by one from the row before
    flat = jnp.pad(rows.reshape(*heads, -1), ((0, 0), (0, 0), (0, queries)))
    return flat.reshape(*heads, queries, -1)[..., :size]


def _strongest(lines: Float32[Array, "B N S"]) -> Float32[Array, "B N KB"]:
    return lines.reshape(*lines.shape[:2], -1, BLOCK).max(-1)


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
