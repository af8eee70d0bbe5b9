"""Defines KVCache and its layers, pools and free lists."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from jaxtyping import Array, Bool, Float32, Int32

from jsparse.shapes import BlockTable, Lengths, Pages, Rows


class PagePool(ABC):
    """Stands in for an array of pages, [pages, P, H], whose pages lie in several memories.

    It has an array's `shape` and `dtype`, and is read and written by the functions of this module.
    jsparse.host_memory.pool.HostPool is the only one, and describes the arrays.
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
    def take(self, rows: Int32[Array, "n"], batch: int) -> "PagePool":
        """Returns what the device has of some of `batch` rows, as a pool of their own."""

    @abstractmethod
    def put(self, part: "PagePool", rows: Int32[Array, "n"], batch: int) -> "PagePool":
        """Returns the pool with what `take` took in the places of these rows."""

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


class SharedPrefixes(NamedTuple):
    """Names rows whose first tokens lie in the same pages, so that these can be read once for all.

    Attributes:
        rows: the rows of each family, in any order; numbers of B or more are nobody. No row is in
            two families.
        tokens: for each family, the first tokens that lie in the same pages, which they fill; 0
            where there is no family. A row of a family holds at least as many, or none at all.
    """

    rows: Int32[Array, "families n"]
    tokens: Int32[Array, "families"]


class LayerCache(NamedTuple):
    """Holds one layer's K and V.

    Attributes:
        k, v: the page pool, flattened over rows and heads: an array, or a PagePool that stands in
            for one where K and V lie in host memory. Every slot is finite, held or not,
            because attention may multiply unattended slots by 0.
        lengths: the number of tokens held, per row and head.
        block_table: the physical page of each logical page; None is the identity.
        free: the unused pages, if there is a table whose pages the device hands out; None with a
            table means that the host writes the table. The identity frees nothing.
        bias: a term added to the logit of each slot; None unless a policy asks for it.
        slot_positions: the text position of each slot; None unless a policy asks for it.
        prefixes: rows that have their first pages in common; None says nothing of any.
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
    """Holds all layers, and each row's position and overflow.

    Attributes:
        layers: K and V, per layer.
        positions: the next text position of each row.
        overflow: rows that found no room for a token. Such a row keeps its tokens and takes in
            nothing more.
    """

    layers: tuple[LayerCache, ...]
    positions: Rows
    overflow: Bool[Array, "B"]

    def of_rows(self, active: Bool[Array, "B"] | None = None) -> "KVCache":
        """Returns the cache itself, in which each row has pages of its own."""
        return self

    def after(self, cache: "KVCache", longer: Bool[Array, "B"] | Rows | None = None) -> "KVCache":
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
        kv = self._map_rows(lambda x, new: x.at[rows].set(new), part)
        pools = [
            new._replace(lengths=layer.lengths, block_table=layer.block_table)
            for layer, new in zip(kv.layers, part.layers, strict=True)
        ]
        return kv._replace(layers=tuple(pools))

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
