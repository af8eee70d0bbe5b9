"""Quest over chunks ranks chunks of the text by the bounds of their keys, as Quest ranks pages.

The minimum and maximum of every channel in a chunk, mid ± half, bound q·k for all its tokens by
q·mid + |q|·half.

Paper: section 3.1 of "LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking
and Hierarchical KV Indexing" (Li et al.), arXiv:2603.08453. It is a pilot study: Quest (Tang et
al.), arXiv:2406.10774, with unchanged scores, but with chunks that end at boundaries of the text
instead of pages of 16 tokens.

Where we differ: chunks are LycheeCluster's, of 8 to 16 tokens; those of the pilot study have the
length of its pages on average, as with lengths=(8, 20). The newest tokens are in no chunk and are
always attended to. As in `quest`, chunks are ranked by q·mid + slack · |q|·half for the group's
mean query; slack=1 and group="max" is the rule of Quest's paper. This is a baseline for quality, so
it has no special kernel.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, get_args

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import CacheSpec, LayerCache
from jsparse.hyper_parameters import number_in, one_of, whole_number
from jsparse.pallas_kernels.page_bounds.api import GroupQueries
from jsparse.pallas_kernels.page_bounds.reference import mean_queries
from jsparse.policies.clusters.chunking import Chunks, chunks_after
from jsparse.policies.clusters.engine import (
    CLASSES,
    ChunkIndex,
    Chunking,
    Settings,
    chunk_policy,
    require_budget,
    require_chunks,
)
from jsparse.policies.clusters.index import keys_of_chunks
from jsparse.policy import Policy
from jsparse.shapes import Lengths, Queries, Rows


class ChunkBounds(NamedTuple):
    """The minimum and maximum keys of one layer's chunks, in K's type."""

    low: Float[Array, "B K C H"]
    high: Float[Array, "B K C H"]


@builder
def quest_chunks(
    budget: int = 1024,
    chunks: Chunking | None = None,
    slack: float = 0.5,
    group: GroupQueries = "mean",
    sink: int = 0,
    recent: int = 9,
    lengths: tuple[int, int] = (8, 16),
    period: int = 16,
) -> Policy:
    """Attends to at most `budget` tokens: the newest, and the chunks with the highest key bounds.

    Rows of at most `budget` tokens are dense.

    Args:
        budget: the maximum number of tokens that a KV head attends to.
        chunks: "structure" ends chunks at boundaries of the text, found with the model's tokenizer;
            "fixed" gives all chunks the maximum length. None: "structure" if the model has a
            tokenizer, else "fixed" with a warning in the log.
        slack: the weight of the bounds' half range, from 0 to 1; 1 in the paper.
        group: "mean" ranks chunks for the mean query of the heads that share a KV head, "max" by
            the highest score among them.
        sink: the number of first tokens that are always attended to.
        recent: the minimum number of newest tokens that are in no chunk; these are always attended
            to.
        lengths: the minimum and maximum tokens of a chunk.
        period: the number of new tokens of a row after which they are cut into chunks.
    """
    whole_number("budget", budget, 1)
    number_in("slack", slack, "[0, 1]")
    one_of("group", group, get_args(GroupQueries))
    whole_number("sink", sink, 0)
    whole_number("period", period, 1)
    shortest, longest = require_chunks(chunks, lengths, recent)
    index = ChunkIndex(
        empty, partial(build, longest), partial(join, longest), partial(scores, slack, group)
    )
    settings = Settings(budget, shortest, longest, CLASSES[chunks], index, sink, recent, period)
    require_budget(settings)
    return chunk_policy(settings)


def empty(spec: CacheSpec, chunks: int) -> ChunkBounds:
    """Returns a layer's initial bounds."""
    zeros = jnp.zeros((spec.batch, spec.num_kv_heads, chunks, spec.head_dim), spec.dtype)
    return ChunkBounds(zeros, zeros)


def build(longest: int, kv: LayerCache, chunks: Chunks) -> ChunkBounds:
    """Returns the bounds of all chunks."""
    return bounds_of(kv, chunks.starts[:, :-1], jnp.diff(chunks.starts), longest)


def join(
    longest: int,
    layers: Sequence[ChunkBounds],
    caches: Sequence[LayerCache],
    before: Rows,
    chunks: Chunks,
    max_new: int,
) -> tuple[ChunkBounds, ...]:
    """Adds the bounds of the chunks after the first `before` of each row, at most `max_new`."""
    nth, there, first, lengths = chunks_after(chunks, before, max_new)
    row = jnp.arange(len(nth), dtype=jnp.int32)[:, None]

    def put(kept: Float[Array, "B K C H"], new: Float[Array, "B K n H"]) -> Float[Array, "B K C H"]:
        at = jnp.where(there, nth, kept.shape[2])
        return kept.at[row, :, at].set(new.swapaxes(1, 2), mode="drop")

    return tuple(
        ChunkBounds(*map(put, bounds, bounds_of(kv, first, lengths, longest)))
        for bounds, kv in zip(layers, caches, strict=True)
    )


def bounds_of(
    kv: LayerCache, first: Int32[Array, "B n"], lengths: Int32[Array, "B n"], longest: int
) -> ChunkBounds:
    """Returns the bounds of slots first … first + lengths - 1; undefined for lengths = 0."""
    keys = keys_of_chunks(kv, first, lengths, longest)
    inside = jnp.arange(longest, dtype=jnp.int32) < lengths[..., None]
    keys = jnp.where(inside[:, None, :, :, None], keys, keys[:, :, :, :1])
    return ChunkBounds(jnp.min(keys, axis=3), jnp.max(keys, axis=3))


def scores(
    slack: float, group: GroupQueries, bounds: ChunkBounds, q: Queries, count: Lengths, tokens: int
) -> Float32[Array, "B K C"]:
    """Returns q·mid + slack · |q|·half of every chunk, the highest among the group's queries."""
    rows, heads, _, width = bounds.low.shape
    if group == "mean":
        q = mean_queries(q, heads)
    grouped = q.astype(jnp.float32).reshape(rows, heads, -1, width)
    low, high = (x.astype(jnp.float32) for x in bounds)
    mid, half = (low + high) / 2, (high - low) / 2
    middle = jnp.einsum("bkgh,bkch->bkgc", grouped, mid, precision=Precision.HIGHEST)
    reach = jnp.einsum("bkgh,bkch->bkgc", jnp.abs(grouped), half, precision=Precision.HIGHEST)
    return jnp.max(middle + slack * reach, axis=2)
