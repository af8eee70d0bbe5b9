"""Defines the paged KV cache and the pure functions that append to it, read it and shrink it.

The cache is head-major and has one entry per layer. A physical page holds P tokens of ONE KV head
of ONE row. A block table maps page m of head (b, k) to its physical page. Without a table the
mapping is the identity: it is page (b·K + k)·M + m, and reading a whole head is a reshape.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.shapes import BlockTable, ChunkKV, Lengths, Pages, Rows


class CacheSpec(NamedTuple):
    """Holds the static sizes of a cache and of a policy's state (letters of jsparse.shapes).

    `pool_pages` is None where every head has M pages of its own (the identity table). A number
    gives each layer a pool of that many pages that all rows and heads share, one of them scratch.
    `model` is the name by which the model was loaded, "" where none was; `auto` looks it up.
    """

    num_layers: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    dtype: Any
    pool_pages: int | None = None
    model: str = ""

    @property
    def pages(self) -> int:
        """Returns the number of physical pages per layer: the first axis of whatever is paged."""
        if self.pool_pages is not None:
            return self.pool_pages
        return self.batch * self.num_kv_heads * self.num_pages

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
        """Returns the number of slots of all pages of all layers."""
        return self.num_layers * self.pages * self.page_size


class PagePool(ABC):
    """Stands in for an array of pages, [pages, P, H], whose pages lie in several memories.

    It has an array's `shape` and `dtype`, and is read and written by the functions of this module.
    jsparse.host_memory.pool.HostPool is the only one, and says what the arrays are.
    """

    ring: Array
    host: Array | None
    resident: Array | None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Returns [pages, P, H]."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """Returns the type of the values."""

    @abstractmethod
    def ring_pages(self, layer: "LayerCache") -> int:
        """Returns the pages per head that the ring holds."""

    @abstractmethod
    def resident_first(self, layer: "LayerCache") -> Int32[Array, "B K 1"]:
        """Returns each head's first page in `resident`; negative for heads that are not there."""

    @abstractmethod
    def read_pages(self, layer: "LayerCache", logical: Int32[Array, "B K n"]) -> Array:
        """Returns chosen pages of each head, [B, K, n, P, H]."""

    @abstractmethod
    def read_slots(self, layer: "LayerCache", slots: Int32[Array, "B K n"]) -> Array:
        """Returns chosen slots of each head, [B, K, n, H]."""

    @abstractmethod
    def read_heads(self, layer: "LayerCache") -> Array:
        """Returns every slot of every head, [B, K, S, H]."""

    @abstractmethod
    def written(
        self,
        layer: "LayerCache",
        slots: Int32[Array, "B K T"],
        ok: Bool[Array, "B K T"],
        rows: Array,
    ) -> "PagePool":
        """Returns the pool with rows [B, K, T, H] at those of the slots that are `ok`."""

    @abstractmethod
    def with_host(self, host: Array | None) -> "PagePool":
        """Returns the pool with its pages in host memory, which it borrows for one program."""


class HostPages(NamedTuple):
    """Holds the pages of one layer in host memory, [pages, P, H] each."""

    k: Array
    v: Array


class FreeList(NamedTuple):
    """Holds a stack of unused physical pages, of which `pages[:count]` are free.

    The pool's last page is the scratch page.
    """

    pages: Int32[Array, "pages"]
    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]


class LayerCache(NamedTuple):
    """Holds one layer's K and V.

    Attributes:
        k, v: the page pool, flattened over rows and heads: an array, or a PagePool that stands in
            for one where K and V lie in host memory. Every slot is finite, held or not,
            because attention may multiply by 0 what it does not attend to.
        lengths: the number of tokens held, per row and head.
        block_table: the physical page of each logical page; None is the identity.
        free: the unused pages, if there is a table whose pages the device hands out; None with a
            table means that the host writes the table. The identity frees nothing.
        bias: a term added to the logit of each slot; None unless a policy asks for it.
        slot_positions: the text position of each slot; None unless a policy asks for it.
    """

    k: Pages | PagePool
    v: Pages | PagePool
    lengths: Lengths
    block_table: BlockTable | None = None
    free: FreeList | None = None
    bias: Float32[Array, "pages P"] | None = None
    slot_positions: Int32[Array, "pages P"] | None = None

    @property
    def page_pools(self) -> tuple[PagePool, PagePool] | None:
        """Returns the pools of K and V that lie in several memories; None on the device."""
        k, v = self.k, self.v
        return (k, v) if isinstance(k, PagePool) and isinstance(v, PagePool) else None

    @property
    def arrays(self) -> tuple[Pages, Pages]:
        """Returns the pools of K and V, which must lie on the device."""
        assert self.page_pools is None
        return cast("tuple[Pages, Pages]", (self.k, self.v))

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
    """Holds all layers, and what is known of each row.

    Attributes:
        layers: K and V, per layer.
        positions: the next text position of each row.
        overflow: rows that found no room for a token. Such a row keeps what it held and takes in
            nothing more.
    """

    layers: tuple[LayerCache, ...]
    positions: Rows
    overflow: Bool[Array, "B"]

    def of_rows(self, active: Bool[Array, "B"] | None = None) -> "KVCache":
        """Returns the cache itself, in which each row has pages of its own."""
        return self

    def after(self, cache: "KVCache", longer: Bool[Array, "B"] | None = None) -> "KVCache":
        """Returns the cache that a program left, which says itself how long its rows are."""
        return cache

    def take(self, rows: Int32[Array, "n"]) -> "KVCache":
        """Returns some rows as a batch of their own, over the same pages.

        Raises:
            ValueError: there is no block table, so that pages cannot be parted from their rows.
        """
        self._require_table()
        return self._map_rows(lambda x: x[rows])

    def put(self, part: "KVCache", rows: Int32[Array, "n"]) -> "KVCache":
        """Returns the cache with the rows of `part` in these places, and the pages of `part`.

        Raises:
            ValueError: there is no block table.
        """
        self._require_table()
        held = self._map_rows(lambda x, new: x.at[rows].set(new), part)
        pools = [
            new._replace(lengths=layer.lengths, block_table=layer.block_table)
            for layer, new in zip(held.layers, part.layers, strict=True)
        ]
        return held._replace(layers=tuple(pools))

    def clear(self, rows: Int32[Array, "n"]) -> "KVCache":
        """Returns the cache without the tokens and pages of these rows.

        To return pages to a free list, call `truncate` before.

        Raises:
            ValueError: there is no block table.
        """
        self._require_table()
        layers = [
            layer._replace(
                lengths=layer.lengths.at[rows].set(0),
                block_table=layer.block_table.at[rows].set(layer.k.shape[0] - 1),
            )
            for layer in self.layers
            if layer.block_table is not None
        ]
        return KVCache(
            tuple(layers), self.positions.at[rows].set(0), self.overflow.at[rows].set(False)
        )

    def _map_rows(self, function: Callable[..., Array], *others: "KVCache") -> "KVCache":
        """Maps over what rows own: lengths, tables, positions and overflow."""
        caches = (self, *others)
        layers = [
            layers[0]._replace(
                lengths=function(*(layer.lengths for layer in layers)),
                block_table=function(*(layer.block_table for layer in layers)),
            )
            for layers in zip(*(cache.layers for cache in caches), strict=True)
        ]
        return KVCache(
            tuple(layers),
            function(*(cache.positions for cache in caches)),
            function(*(cache.overflow for cache in caches)),
        )

    def _require_table(self) -> None:
        if self.layers[0].block_table is None:
            raise ValueError(
                "cache: must have a block table (CacheSpec.pool_pages), so that rows can be moved "
                "without their pages"
            )


class ReadOnly(NamedTuple):
    """Holds what programs read beside the weights; none of it is donated or returned.

    Attributes:
        constants: arrays that belong to the model, by name, among those that the policy `needs`.
        knobs: hyper-parameters that differ by row, by name: one number per row.
        host: what layers have in host memory; None if K and V lie on the device.
    """

    constants: Mapping[str, Array] | None = None
    knobs: Mapping[str, Array] | None = None
    host: tuple[HostPages, ...] | None = None


NOTHING = ReadOnly()


class StepView(NamedTuple):
    """What the hooks of a policy see of a step.

    Attributes:
        cache: K and V, in whichever memories they lie.
        constants, knobs: as in ReadOnly.
        active: the rows that take in a token; None is all.
    """

    cache: KVCache
    constants: Mapping[str, Array] | None = None
    knobs: Mapping[str, Array] | None = None
    active: Bool[Array, "B"] | None = None

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The cache's layers."""
        return self.cache.layers

    @property
    def positions(self) -> Rows:
        """The text position of the token that each row takes in; between steps, of the next."""
        return self.cache.positions


def step_view(cache: KVCache, beside: ReadOnly) -> StepView:
    """Returns what hooks see of a cache; `without_host` of its cache is what a program returns."""
    return StepView(with_host(cache, beside.host), beside.constants, beside.knobs)


def with_host(cache: KVCache, host: tuple[HostPages, ...] | None) -> KVCache:
    """Returns the cache with these pages in the host memory of its layers."""
    if host is None:
        return cache
    return cache._replace(layers=tuple(map(_with_host, cache.layers, host)))


def without_host(cache: KVCache) -> KVCache:
    """Returns the cache without what its layers have in host memory, which must not be donated."""
    return cache._replace(layers=tuple(_with_host(layer, None) for layer in cache.layers))


def _with_host(layer: LayerCache, pages: HostPages | None) -> LayerCache:
    if layer.page_pools is None:
        return layer
    k, v = layer.page_pools
    k, v = k.with_host(pages and pages.k), v.with_host(pages and pages.v)
    return layer._replace(k=k, v=v)


OPTIONAL_FIELDS = ("bias", "slot_positions")


def init(spec: CacheSpec, *, fields: tuple[str, ...] = ()) -> KVCache:
    """Returns an empty cache; where the spec has a shared pool, with block tables and free lists.

    Args:
        spec: the sizes.
        fields: the names in OPTIONAL_FIELDS to allocate.

    Raises:
        ValueError: a field is unknown, or the pool has fewer than two pages.
    """
    heads, pages = (spec.batch, spec.num_kv_heads), spec.pages
    paged = spec.pool_pages is not None
    if paged and pages < 2:
        raise ValueError(f"pool_pages={pages}: must be at least 2, one page and the scratch page")
    unknown = set(fields) - set(OPTIONAL_FIELDS)
    if unknown:
        raise ValueError(
            f"fields={fields}: unknown {sorted(unknown)}, must be among {OPTIONAL_FIELDS}"
        )

    def layer() -> LayerCache:
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
    no_row = jnp.zeros(spec.batch, jnp.bool_)
    return KVCache(layers, jnp.zeros(spec.batch, jnp.int32), no_row)


def spec_of(cache: KVCache, num_heads: int) -> CacheSpec:
    """Returns the sizes of a cache, for a model of `num_heads` query heads."""
    layer = cache.layers[0]
    batch, heads = layer.lengths.shape
    pages, page_size, head_dim = layer.k.shape
    return CacheSpec(
        len(cache.layers),
        batch,
        num_heads,
        heads,
        head_dim,
        page_size,
        layer.num_pages,
        layer.k.dtype,
        None if layer.block_table is None else pages,
    )


def taking_part(view: StepView, tokens: int) -> Rows:
    """Returns how many of `tokens` new tokens each row takes in: all, or none if it is inactive."""
    if view.active is None:
        return jnp.full(view.positions.shape, tokens, jnp.int32)
    return jnp.where(view.active, tokens, 0)


def physical_pages(layer: LayerCache, logical: Int32[Array, "B K n"]) -> Int32[Array, "B K n"]:
    """Returns the physical pages of logical ones, whose ids must be in [0, M)."""
    if layer.block_table is not None:
        return jnp.take_along_axis(layer.block_table, logical, axis=2, mode="clip")
    batch, heads = layer.lengths.shape
    first = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1) * layer.num_pages
    return first + logical


def read_pages(pool: Array | PagePool, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
    """Reads chosen pages of each head, [B, K, n, P, …], from a pool such as `layer.k`.

    A pool is [pages, P, …].
    """
    return _pool(pool).read_pages(layer, logical)


def read_slots(pool: Array | PagePool, layer: LayerCache, slots: Int32[Array, "B K n"]) -> Array:
    """Reads chosen slots of each head one by one, [B, K, n, …], from a pool [pages, P, …]."""
    return _pool(pool).read_slots(layer, slots)


def read_heads(pool: Array | PagePool, layer: LayerCache) -> Array:
    """Reads every slot of every head, [B, K, S, …], from a pool [pages, P, …].

    Under the identity table this is a reshape.
    """
    return _pool(pool).read_heads(layer)


class _Plain(NamedTuple):
    """An array as a pool: all of its pages lie on the device."""

    pages: Array

    def read_pages(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
        return self.pages[physical_pages(layer, logical)]

    def read_slots(self, layer: LayerCache, slots: Int32[Array, "B K n"]) -> Array:
        page, offset = slots // layer.page_size, slots % layer.page_size
        return self.pages[physical_pages(layer, page), offset]

    def read_heads(self, layer: LayerCache) -> Array:
        pages = self.pages if layer.block_table is None else self.pages[layer.block_table]
        return pages.reshape(*layer.lengths.shape, layer.capacity, *self.pages.shape[2:])


def _pool(pool: Array | PagePool) -> _Plain | PagePool:
    return pool if isinstance(pool, PagePool) else _Plain(pool)


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
    return fill(cache, layer_idx, k, v, positions, taken(cache, valid))


def grow(
    cache: KVCache, valid: Rows, max_new: int, *, layers: Sequence[int] | None = None
) -> KVCache:
    """Makes room in each head of row b for the `valid[b]` ≤ `max_new` tokens that `fill` writes.

    It does so in all layers at once, or in those that are named: with the identity table that is
    one launch for all of them.

    A row that finds no room in some layer, or found none earlier, is marked in `cache.overflow` and
    grows nowhere: it keeps what it held. `taken` says how many tokens `fill` may write. Rows are
    served in their order, and one that gets nothing takes nothing from those behind it.
    """
    chosen = range(len(cache.layers)) if layers is None else layers
    held = [cache.layers[i] for i in chosen]
    valid = taken(cache, valid)
    # layers first, then heads: XLA would take apart a reduction over a stack of layers
    full = functools.reduce(
        jnp.logical_or, (layer.lengths + valid[:, None] > layer.capacity for layer in held)
    )
    cache = cache._replace(overflow=cache.overflow | jnp.any(full, axis=1))
    if any(_hands_out(layer) for layer in held):
        short = _short_of_pages(held, taken(cache, valid), max_new)
        cache = cache._replace(overflow=cache.overflow | short)
    valid = taken(cache, valid)
    lengths = [layer.lengths + valid[:, None] for layer in held]
    grown = [_allocate(layer, valid, max_new) for layer in held]
    # nothing below reads the old lengths, which XLA would then copy before the new ones take their
    # (donated) place
    for i, layer, n in zip(chosen, grown, jax.lax.optimization_barrier(lengths), strict=True):
        cache = replace_layer(cache, i, layer._replace(lengths=n))
    return cache


def taken(cache: KVCache, valid: Rows) -> Rows:
    """Returns how many of `valid[b]` new tokens row b takes in: none where room ran out."""
    return jnp.where(cache.overflow, 0, valid)


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

    def put(pool: Any, rows: Array) -> Any:
        if isinstance(pool, PagePool):
            return pool.written(layer, slots, ok, rows)
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


def cut_pages(layer: LayerCache, pages: int) -> LayerCache:
    """Leaves every head room for `pages` pages, in smaller pools; what lies behind them is gone.

    With a block table nothing changes: heads share their pool's pages already.
    """
    if layer.block_table is not None or pages >= layer.num_pages:
        return layer

    def cut(pool: Array | None) -> Array | None:
        if pool is None:
            return None
        by_head = pool.reshape(layer.lengths.size, layer.num_pages, *pool.shape[1:])
        return by_head[:, :pages].reshape(-1, *pool.shape[1:])

    pools = {name: cut(getattr(layer, name)) for name in ("k", "v", *OPTIONAL_FIELDS)}
    return layer._replace(**pools)


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


def _wanted(layer: LayerCache, valid: Rows, max_new: int) -> tuple[Array, Array]:
    """Returns the logical pages that `valid[b]` ≤ `max_new` tokens may touch, and which are new.

    Both are [B, K, n].
    """
    first = _pages_for(layer.lengths, layer.page_size)
    last = _pages_for(layer.lengths + valid[:, None], layer.page_size)
    page = first[:, :, None] + jnp.arange(-(-max_new // layer.page_size) + 1, dtype=jnp.int32)
    return page, (page < last[:, :, None]) & (page < layer.num_pages)


def _hands_out(layer: LayerCache) -> bool:
    """Returns whether the device hands out the layer's pages."""
    return layer.block_table is not None and layer.free is not None


def _short_of_pages(layers: Sequence[LayerCache], valid: Rows, max_new: int) -> Bool[Array, "B"]:
    """Marks the rows for which some layer has too few free pages."""
    counted = [
        (jnp.sum(_wanted(layer, valid, max_new)[1], axis=(1, 2), dtype=jnp.int32), layer.free.count)
        for layer in layers
        if layer.free is not None
    ]
    wanted, free = (jnp.stack(column) for column in zip(*counted, strict=True))  # [L, B], [L]

    def serve(left: Array, row: Array) -> tuple[Array, Array]:
        fits = jnp.all(row <= left)
        return left - jnp.where(fits, row, 0), ~fits

    return jax.lax.cond(
        jnp.any(jnp.sum(wanted, axis=1) > free),
        lambda: jax.lax.scan(serve, free, wanted.T)[1],
        lambda: jnp.zeros(valid.shape, jnp.bool_),
    )


def _allocate(layer: LayerCache, valid: Rows, max_new: int) -> LayerCache:
    """Gives heads the pages for `valid[b]` ≤ `max_new` more tokens, which must be free."""
    if layer.block_table is None or layer.free is None:
        return layer
    page, wanted = _wanted(layer, valid, max_new)
    order = jnp.cumsum(wanted.reshape(-1), dtype=jnp.int32).reshape(wanted.shape)
    pages = layer.free.pages[jnp.maximum(layer.free.count - order, 0)]
    row, head = jnp.indices(layer.lengths.shape, dtype=jnp.int32)
    table = layer.block_table.at[
        row[:, :, None], head[:, :, None], jnp.where(wanted, page, layer.num_pages)
    ].set(pages, mode="drop")
    free = layer.free._replace(count=layer.free.count - order.reshape(-1)[-1])
    return layer._replace(block_table=table, free=free)
