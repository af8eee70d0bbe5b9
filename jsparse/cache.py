"""Defines the paged KV cache and the pure functions that append to it, read it and shrink it.

The cache is head-major and has one entry per layer. A physical page holds P tokens of ONE KV head
of ONE row. A block table maps page m of head (b, k) to its physical page. Without a table the
mapping is the identity: it is page (b·K + k)·M + m, and reading a whole head is a reshape.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.shapes import BlockTable, ChunkKV, Lengths, Pages, Rows


class CacheSpec(NamedTuple):
    """Holds the static sizes of a cache and of a policy's state (letters of jsparse.shapes)."""

    num_layers: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    dtype: Any

    @property
    def capacity(self) -> int:
        """Returns S, the number of tokens that one head can hold."""
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        """Returns the bytes of K and V over all layers."""
        return 2 * self.num_slots * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def num_slots(self) -> int:
        """Returns the number of slots of all heads of all rows and layers."""
        return self.num_layers * self.batch * self.num_kv_heads * self.capacity


class FreeList(NamedTuple):
    """Holds a stack of unused physical pages, of which `pages[:count]` are free.

    The pool's last page is the scratch page.
    """

    pages: Int32[Array, "pages"]
    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]


class LayerCache(NamedTuple):
    """Holds one layer's K and V.

    Attributes:
        k, v: the page pool, flattened over rows and heads. Every slot is finite, held or not,
            because attention may multiply by 0 what it does not attend to.
        lengths: the number of tokens held, per row and head.
        block_table: the physical page of each logical page; None is the identity.
        free: the unused pages, if there is a table; the identity frees nothing.
        bias: a term added to the logit of each slot; None unless a policy asks for it.
        slot_positions: the text position of each slot; None unless a policy asks for it.
    """

    k: Pages
    v: Pages
    lengths: Lengths
    block_table: BlockTable | None = None
    free: FreeList | None = None
    bias: Float32[Array, "pages P"] | None = None
    slot_positions: Int32[Array, "pages P"] | None = None

    @property
    def page_size(self) -> int:
        """Returns P, the number of tokens per page."""
        return self.k.shape[1]

    @property
    def num_pages(self) -> int:
        """Returns M, the number of logical pages that a head can have."""
        if self.block_table is not None:
            return self.block_table.shape[2]
        return self.k.shape[0] // self.lengths.size

    @property
    def capacity(self) -> int:
        """Returns S, the number of slots of a head."""
        return self.num_pages * self.page_size


class KVCache(NamedTuple):
    """Holds all layers, the next text position of each row, and whether room ever ran out."""

    layers: tuple[LayerCache, ...]
    positions: Rows
    overflow: Bool[Array, ""]


OPTIONAL_FIELDS = ("bias", "slot_positions")


def init(
    spec: CacheSpec, *, fields: tuple[str, ...] = (), pool_pages: int | None = None
) -> KVCache:
    """Returns an empty cache.

    Args:
        spec: the sizes.
        fields: the names in OPTIONAL_FIELDS to allocate.
        pool_pages: None gives every head its own M pages (the identity table). A number gives each
            layer a shared pool of that many pages, one of them scratch, with a block table and a
            free list.
    """
    heads = (spec.batch, spec.num_kv_heads)
    pages = spec.batch * spec.num_kv_heads * spec.num_pages if pool_pages is None else pool_pages
    if pool_pages is not None and pool_pages < 2:
        raise ValueError(
            f"pool_pages={pool_pages}: must be at least 2, one page and the scratch page"
        )
    unknown = set(fields) - set(OPTIONAL_FIELDS)
    if unknown:
        raise ValueError(
            f"fields={fields}: unknown {sorted(unknown)}, must be among {OPTIONAL_FIELDS}"
        )

    def layer() -> LayerCache:
        paged = pool_pages is not None
        return LayerCache(
            k=jnp.zeros((pages, spec.page_size, spec.head_dim), spec.dtype),
            v=jnp.zeros((pages, spec.page_size, spec.head_dim), spec.dtype),
            lengths=jnp.zeros(heads, jnp.int32),
            block_table=jnp.full((*heads, spec.num_pages), pages - 1, jnp.int32) if paged else None,
            free=FreeList(jnp.arange(pages, dtype=jnp.int32)[::-1] - 1, jnp.int32(pages - 1))
            if paged
            else None,
            bias=jnp.zeros((pages, spec.page_size), jnp.float32) if "bias" in fields else None,
            slot_positions=jnp.zeros((pages, spec.page_size), jnp.int32)
            if "slot_positions" in fields
            else None,
        )

    layers = tuple(layer() for _ in range(spec.num_layers))
    return KVCache(layers, jnp.zeros(spec.batch, jnp.int32), jnp.bool_(False))


def physical_pages(layer: LayerCache, logical: Int32[Array, "B K n"]) -> Int32[Array, "B K n"]:
    """Returns the physical pages of logical ones, whose ids must be in [0, M)."""
    if layer.block_table is not None:
        return jnp.take_along_axis(layer.block_table, logical, axis=2, mode="clip")
    batch, heads = layer.lengths.shape
    first = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1) * layer.num_pages
    return first + logical


def read_pages(pool: Array, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
    """Reads chosen pages of each head, [B, K, n, P, …], from a pool such as `layer.k`.

    A pool is [pages, P, …].
    """
    return pool[physical_pages(layer, logical)]


def read_slots(pool: Array, layer: LayerCache, slots: Int32[Array, "B K n"]) -> Array:
    """Reads chosen slots of each head one by one, [B, K, n, …], from a pool [pages, P, …]."""
    return pool[physical_pages(layer, slots // layer.page_size), slots % layer.page_size]


def read_heads(pool: Array, layer: LayerCache) -> Array:
    """Reads every slot of every head, [B, K, S, …], from a pool [pages, P, …].

    Under the identity table this is a reshape.
    """
    shape = (*layer.lengths.shape, layer.capacity, *pool.shape[2:])
    return (pool if layer.block_table is None else pool[layer.block_table]).reshape(shape)


def append(
    cache: KVCache,
    layer_idx: int,
    k: ChunkKV,
    v: ChunkKV,
    positions: Int32[Array, "B T"],
    valid: Rows,
) -> KVCache:
    """Appends the first `valid[b]` of T new tokens to each head of row b: `grow`, then `fill`."""
    cache = grow(cache, valid, k.shape[1], layers=(layer_idx,))
    return fill(cache, layer_idx, k, v, positions, valid)


def grow(cache: KVCache, valid: Rows, most: int, *, layers: Sequence[int] | None = None) -> KVCache:
    """Makes room in each head of row b for the `valid[b]` ≤ `most` tokens that `fill` will write.

    It does so in all layers at once, or in those that are named: with the identity table that is
    one launch for all of them.

    A token that finds no room sets `cache.overflow`, and the output of its head must not be used
    from then on; no other head's tokens are touched.
    """
    chosen = range(len(cache.layers)) if layers is None else layers
    held = [cache.layers[i] for i in chosen]
    lengths = [layer.lengths + valid[:, None] for layer in held]
    grown, short = zip(
        *(_allocate(layer, n, most) for layer, n in zip(held, lengths, strict=True)), strict=True
    )
    # layers first, then heads: XLA would take apart a reduction over a stack of layers
    full = functools.reduce(
        jnp.logical_or, (n > layer.capacity for layer, n in zip(held, lengths, strict=True))
    )
    cache = cache._replace(
        overflow=functools.reduce(jnp.logical_or, short, cache.overflow | jnp.any(full))
    )
    # nothing below reads the old lengths, which XLA would then copy before the new ones take their
    # (donated) place
    for i, layer, n in zip(chosen, grown, jax.lax.optimization_barrier(lengths), strict=True):
        cache = replace_layer(cache, i, layer._replace(lengths=n))
    return cache


def fill(
    cache: KVCache,
    layer_idx: int,
    k: ChunkKV,
    v: ChunkKV,
    positions: Int32[Array, "B T"],
    valid: Rows,
) -> KVCache:
    """Writes the first `valid[b]` of T new tokens to the last slots that `grow` made room for."""
    layer = cache.layers[layer_idx]
    layer = write(layer, k, v, positions, valid, layer.lengths - valid[:, None])
    return replace_layer(cache, layer_idx, layer)


def write(
    layer: LayerCache,
    k: ChunkKV,
    v: ChunkKV,
    positions: Int32[Array, "B T"],
    valid: Rows,
    first: Lengths,
) -> LayerCache:
    """Stores the first `valid[b]` of T tokens at the slots first, first + 1, … of each head.

    The pages must already be there; lengths do not change. `fill` uses it, and so does the
    correction that overwrites recomputed tokens.
    """
    steps = jnp.arange(k.shape[1], dtype=jnp.int32)
    slots = first[:, :, None] + steps  # [B, K, T]
    ok = (steps < valid[:, None])[:, None] & (slots >= 0) & (slots < layer.capacity)
    pages = physical_pages(layer, jnp.where(ok, slots // layer.page_size, 0))
    at = (jnp.where(ok, pages, layer.k.shape[0]), slots % layer.page_size)  # out of range: dropped

    def put(pool: Array, rows: Array) -> Array:
        return pool.at[at].set(rows.astype(pool.dtype), mode="drop")

    layer = layer._replace(k=put(layer.k, k.swapaxes(1, 2)), v=put(layer.v, v.swapaxes(1, 2)))
    if layer.bias is not None:
        layer = layer._replace(bias=put(layer.bias, jnp.zeros(slots.shape)))
    if layer.slot_positions is not None:
        layer = layer._replace(
            slot_positions=put(
                layer.slot_positions, jnp.broadcast_to(positions[:, None], slots.shape)
            )
        )
    return layer


def truncate(layer: LayerCache, lengths: Lengths) -> LayerCache:
    """Shortens heads to `lengths` (never lengthens) and returns empty pages to the free list."""
    lengths = jnp.minimum(lengths, layer.lengths)
    if layer.block_table is None or layer.free is None:
        return layer._replace(lengths=lengths)
    page = jnp.arange(layer.num_pages, dtype=jnp.int32)
    used, kept = (_pages_for(n, layer.page_size)[:, :, None] for n in (layer.lengths, lengths))
    scratch = layer.k.shape[0] - 1
    freed = ((page >= kept) & (page < used) & (layer.block_table != scratch)).reshape(-1)
    order = jnp.cumsum(freed, dtype=jnp.int32)
    at = jnp.where(freed, layer.free.count + order - 1, layer.k.shape[0])
    free = FreeList(
        layer.free.pages.at[at].set(layer.block_table.reshape(-1), mode="drop"),
        layer.free.count + order[-1],
    )
    table = jnp.where(page < kept, layer.block_table, scratch)
    return layer._replace(lengths=lengths, block_table=table, free=free)


def replace_layer(cache: KVCache, layer_idx: int, layer: LayerCache) -> KVCache:
    """Returns the cache with one layer's entry replaced."""
    return cache._replace(layers=(*cache.layers[:layer_idx], layer, *cache.layers[layer_idx + 1 :]))


def slot_positions(layer: LayerCache) -> Int32[Array, "B K S"]:
    """Returns the text position of every slot of every head.

    It is the slot's own number unless a policy keeps positions.
    """
    if layer.slot_positions is not None:
        return read_heads(layer.slot_positions, layer)
    shape = (*layer.lengths.shape, layer.capacity)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 2)


def _pages_for(tokens: Lengths, page_size: int) -> Lengths:
    return (tokens + page_size - 1) // page_size


def _allocate(
    layer: LayerCache, lengths: Lengths, max_new: int
) -> tuple[LayerCache, Bool[Array, ""]]:
    """Gives heads the pages for growing to `lengths`; also returns whether the pool ran dry.

    A head that finds no free page gets the scratch page.
    """
    if layer.block_table is None or layer.free is None:
        return layer, jnp.bool_(False)
    first = _pages_for(layer.lengths, layer.page_size)
    step = jnp.arange(-(-max_new // layer.page_size) + 1, dtype=jnp.int32)
    page = first[:, :, None] + step
    wanted = (page < _pages_for(lengths, layer.page_size)[:, :, None]) & (page < layer.num_pages)
    order = jnp.cumsum(wanted.reshape(-1), dtype=jnp.int32).reshape(wanted.shape)
    at = layer.free.count - order
    taken = jnp.where(at >= 0, layer.free.pages[jnp.maximum(at, 0)], layer.k.shape[0] - 1)
    row, head = jnp.indices(layer.lengths.shape, dtype=jnp.int32)
    table = layer.block_table.at[
        row[:, :, None], head[:, :, None], jnp.where(wanted, page, layer.num_pages)
    ].set(taken, mode="drop")
    total = order.reshape(-1)[-1]
    free = layer.free._replace(count=jnp.maximum(layer.free.count - total, 0))
    return layer._replace(block_table=table, free=free), total > layer.free.count
