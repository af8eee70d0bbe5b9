"""Attention of prompt chunks, and chunk sizes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jsparse.cache import CacheSpec, LayerCache, read_pages
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.block_sparse_decode.api import MAX_QUERIES
from jsparse.pallas_kernels.new_token_attention import new_token_attention
from jsparse.selection import everything
from jsparse.selection.partials import ListedLogits, Stats, StatsKind, merge
from jsparse.shapes import ChunkKV, ChunkQueries, Rows

# Tokens per chunk, and per block of the cache that it attends to. Flash attention never stores
# chunk × block scores; plain attention does.
FLASH_CHUNK, PLAIN_CHUNK = 8192, 512
# The minimum padded size of a chunk.
MIN_CHUNK = 64
# Tokens of all rows whose K and V are copied at a time for flash attention: 0.3 GB for an 8B model
FLASH_COPIED = 8 * FLASH_CHUNK


def attend_chunk(
    q: ChunkQueries, k: ChunkKV, v: ChunkKV, kv: LayerCache, valid: Rows
) -> ChunkQueries:
    """Attends causally from a chunk to itself and to everything that its row held before it.

    The chunk's own k and v are the last `valid[b]` tokens in the cache. All heads of a row must
    hold the same number of tokens, which is true unless a policy has compacted them.
    """
    lengths = kv.lengths[:, 0] - valid
    tokens = max(q.shape[1], _block_tokens(q.shape[0], q.shape[-1], q.dtype))
    pages = max(min(tokens // kv.page_size, kv.num_pages), 1)
    block = pages * kv.page_size

    def step(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        # the last block may extend past the last page: the slots that it reads twice are beyond
        # every length
        logical = jnp.minimum(i * pages + jnp.arange(pages, dtype=jnp.int32), kv.num_pages - 1)
        logical = jnp.broadcast_to(logical, (*kv.lengths.shape, pages))
        keys, values = (_by_token(read_pages(pool, kv, logical)) for pool in (kv.k, kv.v))
        seen = jnp.clip(lengths - i * block, 0, block)
        return merge(*so_far, *flash(q, keys, values, kv_lengths=seen))

    blocks = (jnp.max(lengths) + block - 1) // block
    o, _ = jax.lax.fori_loop(0, blocks, step, flash(q, k, v, causal=True))
    return o.astype(q.dtype)


def attend_few(
    q: ChunkQueries,
    k: ChunkKV,
    v: ChunkKV,
    kv: LayerCache,
    valid: Rows,
    *,
    stats: StatsKind | None = None,
) -> tuple[ChunkQueries, Stats | ListedLogits | None]:
    """Computes `attend_chunk` for chunks of a few tokens per row.

    All of these queries attend to the row's earlier tokens at once: the decode kernel reads them
    once per call. The first call also makes the report that `stats` asks for, on the mean of its
    queries. That of a single token includes the token itself, as in a decode step.
    """
    if q.shape[1] == 1:  # as a decode step: a single token attends to all that its row holds
        own = kv._replace(lengths=jnp.where(valid[:, None] > 0, kv.lengths, 0))
        out = block_sparse_decode(q[:, 0], own, everything(own.lengths), stats=stats, dtype=q.dtype)
        return out.o[:, None], out.stats
    # inactive rows read nothing
    past = kv._replace(lengths=jnp.where(valid[:, None] > 0, kv.lengths - valid[:, None], 0))
    # a report adds one query, the mean
    size = max((MAX_QUERIES - (stats is not None)) // (q.shape[2] // k.shape[2]), 1)
    if stats is not None:
        # queries past the last valid token are padding, and must not change the mean
        nth = jnp.arange(q.shape[1], dtype=jnp.int32)[:, None, None]
        own = nth < valid[:, None, None, None]
        total = jnp.sum(jnp.where(own, q, 0), axis=1, keepdims=True, dtype=jnp.float32)
        mean = total / jnp.maximum(valid, 1)[:, None, None, None]
        q = jnp.where(own, q, mean.astype(q.dtype))
    parts = [
        _attend_past(q[:, at : at + size], past, stats if at == 0 else None)
        for at in range(0, q.shape[1], size)
    ]
    o, lse = (
        jnp.concatenate([getattr(part, name) for part in parts], axis=2) for name in ("o", "lse")
    )
    return new_token_attention(q, k, v, o, lse), parts[0].stats


class _Past(NamedTuple):
    """The attention of a few tokens to earlier tokens, by KV head, with its report."""

    o: Float32[Array, "B K rows H"]
    lse: Float32[Array, "B K rows"]
    stats: Stats | ListedLogits | None


def _attend_past(q: ChunkQueries, past: LayerCache, stats: StatsKind | None) -> _Past:
    """Attends from all queries to everything in a layer."""
    batch, tokens, _, head_dim = q.shape
    by_head = q.reshape(batch, tokens, past.lengths.shape[1], -1, head_dim).swapaxes(1, 2)
    flat = by_head.reshape(batch, -1, head_dim)
    out = block_sparse_decode(flat, past, everything(past.lengths), stats=stats)
    shape = (*past.lengths.shape, -1)
    return _Past(out.o.reshape(*shape, head_dim), out.lse.reshape(shape), out.stats)


def flash(
    q: ChunkQueries,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = False,
    kv_lengths: Rows | None = None,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]:
    """Returns (o, lse) of one block.

    It uses cuDNN's flash attention if the GPU and dtype support it, and plain XLA otherwise.
    """
    fused = has_flash(q.shape[-1], q.dtype)
    if q.dtype == jnp.float16 and jax.default_backend() == "cpu":
        # jax requests float16 products with float32 sums, which XLA lacks on a CPU
        q = q.astype(jnp.float32)
    o, lse = jax.nn.dot_product_attention(
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        is_causal=causal,
        key_value_seq_lengths=kv_lengths,
        implementation="cudnn" if fused else "xla",
        return_residual=True,
    )
    o, lse = o.astype(jnp.float32), lse.astype(jnp.float32)
    if kv_lengths is None:
        return o, lse
    some = (kv_lengths > 0)[:, None, None]
    return jnp.where(some[..., None], o, 0.0), jnp.where(some, lse, -jnp.inf)


def has_flash(head_dim: int, dtype: Any) -> bool:
    """Returns whether cuDNN's flash attention supports head_dim and dtype on the default device."""
    fits = head_dim % 8 == 0 and head_dim <= 128 and dtype in (jnp.bfloat16, jnp.float16)
    return fits and jax.default_backend() == "gpu"


def _block_tokens(batch: int, head_dim: int, dtype: Any) -> int:
    """Returns the number of cached tokens per row that one block holds."""
    if has_flash(head_dim, dtype):
        return min(FLASH_CHUNK, FLASH_COPIED // batch)
    return PLAIN_CHUNK // batch


def _flash_tokens(head_dim: int, dtype: Any) -> int:
    return FLASH_CHUNK if has_flash(head_dim, dtype) else PLAIN_CHUNK


def _by_token(pages: Float[Array, "B K n P H"]) -> ChunkKV:
    batch, heads, n, size, head_dim = pages.shape
    return pages.reshape(batch, heads, n * size, head_dim).swapaxes(1, 2)


def chunk_tokens(spec: CacheSpec) -> int:
    """Returns the number of tokens per prompt chunk and row, for a cache of these sizes.

    It is large enough to fill the device, and small enough to keep activations and scores small. On
    a CPU compilation takes longer than computation, so all chunks have one size per capacity:
    padding is at most an eighth of the capacity, or 63 tokens.
    """
    maximum = _flash_tokens(spec.head_dim, spec.dtype) // spec.batch
    if jax.default_backend() == "cpu":
        maximum = min(maximum, spec.capacity // 8)
    return max(MIN_CHUNK, 2 ** int(math.log2(max(maximum, 1))))


def chunk_sizes(length: int, chunk: int) -> list[int]:
    """Splits a prompt of `length` tokens into whole chunks and one padded up to a power of two.

    No chunk has fewer than MIN_CHUNK tokens unless all have; on a CPU all have the same size.
    """
    if jax.default_backend() == "cpu":
        return [chunk] * -(-length // chunk)
    whole, rest = divmod(length, chunk)
    sizes = [chunk] * whole
    return [*sizes, min(chunk, max(MIN_CHUNK, 2 ** math.ceil(math.log2(rest))))] if rest else sizes
