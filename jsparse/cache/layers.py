"""KVCache and its layers, pools and free lists."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from jaxtyping import Array, Bool, Float32, Int32

from jsparse.shapes import BlockTable, Lengths, Pages, Rows


class PagePool(ABC):
    """Pages, [pages, P, H], that are not stored as one array of their values' type.

    It has an array's `shape` and `dtype`; the functions of this package read and write it.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[pages, P, H]."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """The type of the values that are read."""

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """The bytes of one token."""

    @abstractmethod
    def read_pages(self, layer: "LayerCache", logical: Int32[Array, "B K n"]) -> Array:
        """Returns selected pages of each head, [B, K, n, P, H]."""

    @abstractmethod
    def read_slots(self, layer: "LayerCache", slots: Int32[Array, "B K n"]) -> Array:
        """Returns selected slots of each head, [B, K, n, H]."""

    @abstractmethod
    def read_heads(self, layer: "LayerCache") -> Array:
        """Returns every slot of every head, [B, K, S, H]."""

    @abstractmethod
    def rounded(self, rows: Array) -> Array:
        """Returns rows [B, K, T, H] as reading returns them once they are written."""

    @abstractmethod
    def written(
        self,
        layer: "LayerCache",
        slots: Int32[Array, "B K T"],
        ok: Bool[Array, "B K T"],
        rows: Array,
    ) -> Self:
        """Returns the pool with rows [B, K, T, H] written to the slots that are `ok`."""

    @property
    @abstractmethod
    def on_host(self) -> bool:
        """Whether the pages are in host memory, with the newest on the device."""

    @abstractmethod
    def map_pages(self, function: Callable[[Any], Any]) -> Any:
        """Returns the pool with each of its arrays of pages replaced by the function's result.

        In host memory, these are TieredPools.
        """

    def of_head(self, head: Int32[Array, ""]) -> Self:
        """Returns the pool for a layer of one KV head, that head."""
        return self

    def with_host(self, host: Any) -> Self:
        """Returns the pool with its pages in host memory, borrowed for one program.

        They are what HostPages holds; None: none.
        """
        return self

    def take(self, rows: Int32[Array, "n"], batch: int) -> Self:
        """Returns the arrays of some of `batch` rows, as a pool; those of all pages are shared."""
        return self

    def put(self, part: Any, rows: Int32[Array, "n"], batch: int) -> Self:
        """Returns the pool with a part from `take` in the place of these rows."""
        return part


class TieredPool(PagePool):
    """Pages in host memory, with the newest on the device.

    jsparse.host_memory.pool.HostPool is the only implementation, and documents the arrays.
    """

    ring: Array
    host: Array | None
    resident: Array | None

    @abstractmethod
    def ring_pages(self, layer: "LayerCache") -> int:
        """Returns the number of pages per head in the ring."""

    @abstractmethod
    def resident_first(self, layer: "LayerCache") -> Int32[Array, "B K 1"]:
        """Returns each head's first page in `resident`; negative for heads without pages there."""


class HostPages(NamedTuple):
    """The pages of one layer in host memory, [pages, P, H] each, or Int8Pages of such arrays."""

    k: Array | PagePool
    v: Array | PagePool


class FreeList(NamedTuple):
    """A stack of unused physical pages; `pages[:count]` are free.

    The pool's last page is the scratch page.
    """

    pages: Int32[Array, "pages"]
    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]


class SharedPrefixes(NamedTuple):
    """Rows that share the pages of their first tokens, which are then read once for all of them.

    Attributes:
        rows: the rows of each shared prefix, in any order; numbers ≥ B are padding. No row has two
            shared prefixes.
        tokens: the length of each shared prefix, in whole pages; 0 for padding. Each of its rows
            has at least that number of tokens, or none at all.
    """

    rows: Int32[Array, "families n"]
    tokens: Int32[Array, "families"]


class LayerCache(NamedTuple):
    """One layer's K and V.

    Attributes:
        k, v: the page pool, flattened over rows and heads: an array, or a PagePool if K and V are
            in host memory or in 8 bits. Every slot is finite, used or not, because attention may
            multiply unattended slots by 0.
        lengths: the number of tokens, per row and head.
        block_table: the physical page of each logical page; None: the identity.
        free: the unused pages, if the device allocates the table's pages; None with a table: the
            host writes the table. With the identity, pages are never freed.
        bias: a term added to the logit of each slot; None unless a policy requests it.
        slot_positions: the text position of each slot; None unless a policy requests it.
        prefixes: the shared prefixes of rows; None: no information.
    """

    k: Pages | PagePool
    v: Pages | PagePool
    lengths: Lengths
    block_table: BlockTable | None = None
    free: FreeList | None = None
    bias: Float32[Array, "pages P"] | None = None
    slot_positions: Int32[Array, "pages P"] | None = None
    prefixes: SharedPrefixes | None = None

    @property
    def on_host(self) -> bool:
        """Whether K and V are in host memory, with the newest tokens on the device."""
        return isinstance(self.k, PagePool) and self.k.on_host

    @property
    def arrays(self) -> tuple[Pages, Pages]:
        """The pools of K and V, each of which must be one array."""
        assert not isinstance(self.k, PagePool)
        assert not isinstance(self.v, PagePool)
        return self.k, self.v

    @property
    def page_size(self) -> int:
        """P, the number of tokens per page."""
        return self.k.shape[1]

    @property
    def slot_bytes(self) -> int:
        """The bytes of K and V of one token of one head."""
        return sum(
            pool.slot_bytes if isinstance(pool, PagePool) else pool.shape[2] * pool.dtype.itemsize
            for pool in (self.k, self.v)
        )

    @property
    def num_pages(self) -> int:
        """M, the maximum number of logical pages of a head."""
        if self.block_table is not None:
            return self.block_table.shape[2]
        return self.k.shape[0] // self.lengths.size

    @property
    def capacity(self) -> int:
        """S, the number of slots of a head."""
        return self.num_pages * self.page_size


class KVCache(NamedTuple):
    """All layers, and each row's position and overflow.

    Attributes:
        layers: K and V, per layer.
        positions: the next text position of each row.
        overflow: rows that had no room for a token. Such a row keeps its tokens and accepts no
            more.
    """

    layers: tuple[LayerCache, ...]
    positions: Rows
    overflow: Bool[Array, "B"]

    def of_rows(self, active: Bool[Array, "B"] | None = None) -> "KVCache":
        """Returns the cache itself, since each row has its own pages."""
        return self

    def after(self, cache: "KVCache", longer: Bool[Array, "B"] | Rows | None = None) -> "KVCache":
        """Returns the cache that a program returned, since it has its own lengths."""
        return cache

    def take(self, rows: Int32[Array, "n"]) -> "KVCache":
        """Returns some rows as a separate batch, over the same pages.

        Raises:
            ValueError: there is no block table, so pages cannot be separated from their rows.
        """
        self._require_table()
        return self._map_rows(lambda x: x[rows])

    def put(self, part: "KVCache", rows: Int32[Array, "n"]) -> "KVCache":
        """Returns the cache with the rows of `part` in these positions, and the pages of `part`.

        Raises:
            ValueError: there is no block table.
        """
        self._require_table()
        kv = self._map_rows(lambda x, new: x.at[rows].set(new), part)
        pools = [
            new._replace(lengths=layer.lengths, block_table=layer.block_table)
            for layer, new in zip(kv.layers, part.layers, strict=True)
        ]
        return kv._replace(layers=tuple(pools))

    def clear(self, rows: Int32[Array, "n"]) -> "KVCache":
        """Returns the cache without the tokens and pages of these rows.

        To return pages to a free list, call `truncate` first.

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
        """Maps over the arrays of rows: lengths, tables, positions and overflow."""
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
