"""Attention of prompt chunks, and chunk sizes."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jsparse.cache import CacheSpec, LayerCache, read_pages
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.block_sparse_decode.api import MAX_QUERIES
from jsparse.pallas_kernels.block_sparse_prefill import BLOCK
from jsparse.pallas_kernels.new_token_attention import new_token_attention
from jsparse.policy import PrefillMethod
from jsparse.selection import Granularity, Selection, everything
from jsparse.selection import window as select_window
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
    q: ChunkQueries,
    k: ChunkKV,
    v: ChunkKV,
    kv: LayerCache,
    valid: Rows,
    window: int | None = None,
) -> ChunkQueries:
    """Attends causally from a chunk to itself and to everything that its row held before it.

    The chunk's own k and v are the last `valid[b]` tokens in the cache. All heads of a row must
    hold the same number of tokens, which is true unless a policy has compacted them. With a
    `window`, each token attends to this many newest tokens, its own included.
    """
    if window is not None:
        return _attend_in_window(q, kv, valid, window)
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


def _attend_in_window(q: ChunkQueries, kv: LayerCache, valid: Rows, window: int) -> ChunkQueries:
    """Attends from a chunk that the cache holds, some queries at a time, to their windows' pages.

    Masks need plain attention, so blocks of queries have its size.
    """
    batch, tokens, _, head_dim = q.shape
    size = min(tokens, max(PLAIN_CHUNK // batch, 1))
    blocks = -(-tokens // size)
    # a window may start within a page
    pages = min(-(-(window + size) // kv.page_size) + 1, kv.num_pages)
    first = kv.lengths[:, 0] - valid

    def block(nth_and_part: tuple[Array, ChunkQueries]) -> ChunkQueries:
        nth, part = nth_and_part
        positions = first[:, None] + nth * size + jnp.arange(size, dtype=jnp.int32)
        oldest = jnp.maximum(positions[:, 0] - window + 1, 0) // kv.page_size
        logical = oldest[:, None] + jnp.arange(pages, dtype=jnp.int32)
        slots = logical[..., None] * kv.page_size + jnp.arange(kv.page_size, dtype=jnp.int32)
        age = positions[:, :, None] - slots.reshape(batch, 1, -1)
        # pages past the last one repeat it under slots that no query has reached
        logical = jnp.minimum(logical, kv.num_pages - 1)[:, None]
        logical = jnp.broadcast_to(logical, (*kv.lengths.shape, pages))
        keys, values = (_by_token(read_pages(pool, kv, logical)) for pool in (kv.k, kv.v))
        seen = (age >= 0) & (age < window)
        return _jax_attention(part, keys, values, mask=seen[:, None])[0].astype(q.dtype)

    padded = jnp.pad(q, ((0, 0), (0, blocks * size - tokens), (0, 0), (0, 0)))
    parts = padded.reshape(batch, blocks, size, -1, head_dim).swapaxes(0, 1)
    o = jax.lax.map(block, (jnp.arange(blocks, dtype=jnp.int32), parts))
    return o.swapaxes(0, 1).reshape(padded.shape)[:, :tokens]


def newest(kv: LayerCache, window: int | None, *, granularity: Granularity = "page") -> Selection:
    """Selects the last `window` tokens of each head; None: everything."""
    if window is None:
        return everything(kv.lengths)
    return select_window(
        kv.lengths,
        sink=0,
        recent=window,
        num_pages=kv.num_pages,
        page_size=kv.page_size,
        granularity=granularity,
    )


def attend_few(
    q: ChunkQueries,
    k: ChunkKV,
    v: ChunkKV,
    kv: LayerCache,
    valid: Rows,
    window: int | None = None,
    *,
    stats: StatsKind | None = None,
) -> tuple[ChunkQueries, Stats | ListedLogits | None]:
    """Computes `attend_chunk` for chunks of a few tokens per row.

    All of these queries attend to the row's earlier tokens at once: the decode kernel reads them
    once per call. The first call also makes the report that `stats` asks for, on the mean of its
    queries. That of a single token includes the token itself, as in a decode step. With a window,
    every token attends as a single one does, and the report is the first token's.
    """
    if q.shape[1] == 1:  # as a decode step: a single token attends to all that its row holds
        own = kv._replace(lengths=jnp.where(valid[:, None] > 0, kv.lengths, 0))
        out = block_sparse_decode(q[:, 0], own, newest(own, window), stats=stats, dtype=q.dtype)
        return out.o[:, None], out.stats
    if window is not None:
        first = kv.lengths - valid[:, None]
        each = [
            attend_few(
                q[:, nth : nth + 1],
                k[:, nth : nth + 1],
                v[:, nth : nth + 1],
                kv._replace(lengths=first + nth + 1),
                jnp.clip(valid - nth, 0, 1),
                window,
                stats=stats if nth == 0 else None,
            )
            for nth in range(q.shape[1])
        ]
        return jnp.concatenate([o for o, _ in each], axis=1), each[0][1]
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
    window: int | None = None,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]:
    """Returns (o, lse) of one block; with a window, each causal query sees that many newest keys.

    It uses cuDNN's flash attention if the GPU and dtype support it, and plain XLA otherwise.
    """
    o, lse = _jax_attention(
        q,
        k,
        v,
        is_causal=causal,
        key_value_seq_lengths=kv_lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if has_flash(q.shape[-1], q.dtype) else "xla",
    )
    if kv_lengths is None:
        return o, lse
    some = (kv_lengths > 0)[:, None, None]
    return jnp.where(some[..., None], o, 0.0), jnp.where(some, lse, -jnp.inf)


def _jax_attention(
    q: ChunkQueries,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    implementation: Literal["xla", "cudnn"] = "xla",
    **options: Any,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]:
    """Returns (o, lse) of jax's attention with these options."""
    if q.dtype == jnp.float16 and jax.default_backend() == "cpu":
        # jax requests float16 products with float32 sums, which XLA lacks on a CPU
        q = q.astype(jnp.float32)
    o, lse = jax.nn.dot_product_attention(
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        implementation=implementation,
        return_residual=True,
        **options,
    )
    return o.astype(jnp.float32), lse.astype(jnp.float32)


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


def chunk_tokens(spec: CacheSpec, method: PrefillMethod | None = None) -> int:
    """Returns the number of tokens per prompt chunk and row, for a cache of these sizes.

    It is large enough to fill the device, and small enough to keep activations and scores small. On
    a CPU compilation takes longer than computation, so all chunks have one size per capacity:
    padding is at most an eighth of the capacity, or 63 tokens. A prefill method has chunks of whole
    blocks, so that its choice does not depend on their size.
    """
    maximum = _flash_tokens(spec.head_dim, spec.dtype) // spec.batch
    if jax.default_backend() == "cpu":
        maximum = min(maximum, spec.capacity // 8)
    return max(min_chunk(method), 2 ** int(math.log2(max(maximum, 1))))


def min_chunk(method: PrefillMethod | None) -> int:
    """Returns the minimum size of a chunk that others follow."""
    return MIN_CHUNK if method is None else BLOCK


def chunk_sizes(length: int, chunk: int) -> list[int]:
    """Splits a prompt of `length` tokens into whole chunks and one padded up to a power of two.

    No chunk has fewer than MIN_CHUNK tokens unless all have; on a CPU all have the same size.
    """
    if jax.default_backend() == "cpu":
        return [chunk] * -(-length // chunk)
    whole, rest = divmod(length, chunk)
    sizes = [chunk] * whole
    return [*sizes, min(chunk, max(MIN_CHUNK, 2 ** math.ceil(math.log2(rest))))] if rest else sizes
