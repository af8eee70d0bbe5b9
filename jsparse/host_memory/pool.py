"""Defines HostPool: a layer's K or V in host memory, with the newest tokens on the device.

The tail is a ring of R pages per head on the device, with the newest R pages of the head. A page is
read from the ring if it is one of these, and from host memory otherwise; only the head's length
decides. A page must be stored in host memory (`pages.stored`) before the ring overwrites it, and
nothing else is ever written there.

Pages in host memory are not part of the cache: programs borrow them (`jsparse.cache.with_host`), so
that they are never in a donated buffer. Heads that attend to everything in every step can have all
their pages on the device as well.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.cache import (
    Int8Pages,
    LayerCache,
    TieredPool,
    map_pages,
    physical_pages,
    rounded_to,
)
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.shapes import BlockTable, Lengths


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ring", "host", "resident", "table"),
    meta_fields=("pages", "heads"),
)
@dataclass(frozen=True)
class HostPool(TieredPool):
    """K or V of one layer, or the scales of K or V in 8 bits, which have no axis H.

    Attributes:
        ring: [B·K·R, P, H] on the device; page m of a head is page m mod R of its ring.
        host: [pages, P, H] in host memory; None between programs: then only the ring is read.
        resident: [B·n·M, P, H] on the device, all pages of the n KV heads `heads`; None: no heads.
        pages: the number of pages that the rows can have.
        heads: the resident KV heads, ascending.
        table: the page in host memory of each logical page; None: the layer's table.
    """

    # jax also builds such trees of shapes, which are not arrays
    __no_type_check__: ClassVar[bool] = True

    ring: Array
    host: Array | None
    resident: Array | None
    pages: int
    heads: tuple[int, ...] = ()
    table: BlockTable | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, P, H], the shape of an array with the same pages in one memory."""
        return self.pages, *self.ring.shape[1:]

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.ring.dtype

    @property
    def slot_bytes(self) -> int:
        """The bytes of one token."""
        return math.prod(self.ring.shape[2:]) * self.dtype.itemsize

    @property
    def on_host(self) -> bool:
        """True."""
        return True

    def map_pages(self, function: Callable[["HostPool"], Any]) -> Any:
        """Returns the function's result for the pool."""
        return function(self)

    def ring_pages(self, layer: LayerCache) -> int:
        """Returns R, the pages of each head's ring."""
        return self.ring.shape[0] // layer.lengths.size

    def host_pages(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
        """Returns the ids in host memory of logical pages."""
        if self.table is None:
            return physical_pages(layer, logical)
        return jnp.take_along_axis(self.table, logical, axis=2, mode="clip")

    def on_ring(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Bool[Array, "B K n"]:
        """Marks the pages that are read from the ring."""
        newest = (layer.lengths - 1) // layer.page_size
        return logical > newest[..., None] - self.ring_pages(layer)

    def ring_at(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Int32[Array, "B K n"]:
        """Returns the indices in `ring` of pages that are in the ring."""
        first = _pairs(layer) * self.ring_pages(layer)
        return first + logical % self.ring_pages(layer)

    def read_pages(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
        """Returns chosen pages of each head, [B, K, n, P, H]."""
        return self.with_ring(layer, logical, None, self.fetched(layer, logical, None))

    def read_slots(self, layer: LayerCache, slots: Int32[Array, "B K n"]) -> Array:
        """Returns chosen slots of each head, [B, K, n, H]."""
        at = jnp.divmod(slots, layer.page_size)
        return self.with_ring(layer, *at, self.fetched(layer, *at))

    def read_heads(self, layer: LayerCache) -> Array:
        """Returns every slot of every head, [B, K, S, H]."""
        pages = jnp.arange(layer.num_pages, dtype=jnp.int32)
        every = jnp.broadcast_to(pages, (*layer.lengths.shape, pages.size))
        shape = (*layer.lengths.shape, layer.capacity, *self.shape[2:])
        return self.read_pages(layer, every).reshape(shape)

    def fetched(
        self,
        layer: LayerCache,
        page: Int32[Array, "B K n"],
        offset: Int32[Array, "B K n"] | None,
        count: Lengths | None = None,
    ) -> Array | None:
        """Returns the first `count` slots from host memory, or pages if `offset` is None.

        The others, and those in the ring, are zeros.
        """
        if self.host is None:
            return None
        at, row_axes = self.host_pages(layer, page), 1
        if offset is not None:
            at, row_axes = at * layer.page_size + offset, 2
        return row_gather(
            self.host, jnp.where(self.on_ring(layer, page), -1, at), count, row_axes=row_axes
        )

    def with_ring(
        self,
        layer: LayerCache,
        page: Int32[Array, "B K n"],
        offset: Int32[Array, "B K n"] | None,
        fetched: Array | None,
    ) -> Array:
        """Returns the result of `fetched`, completed by the slots or pages in the ring."""
        at = self.ring_at(layer, page)
        ring = self.ring[at] if offset is None else self.ring[at, offset]
        if fetched is None:
            return ring
        here = self.on_ring(layer, page)
        return jnp.where(here.reshape(*here.shape, *(1,) * (ring.ndim - here.ndim)), ring, fetched)

    def rounded(self, rows: Array) -> Array:
        """Returns rows in the type of the values."""
        return rounded_to(rows, self.dtype)

    def written(
        self,
        layer: LayerCache,
        slots: Int32[Array, "B K T"],
        ok: Bool[Array, "B K T"],
        rows: Array,
    ) -> "HostPool":
        """Returns the pool with rows [B, K, T, H] in the ring, and in resident heads' pages."""
        page, offset = slots // layer.page_size, slots % layer.page_size
        rows = rows.astype(self.dtype)

        def put(pool: Array, at: Array, heads: Any) -> Array:
            at = jnp.where(ok[:, heads], at, pool.shape[0])  # out of range: dropped
            return pool.at[at, offset[:, heads]].set(rows[:, heads], mode="drop")

        every = slice(None)
        ring = put(self.ring, self.ring_at(layer, page), every)
        if self.resident is None:
            return replace(self, ring=ring)
        heads = list(self.heads)
        at = self.resident_first(layer)[:, heads] + page[:, heads]
        return replace(self, ring=ring, resident=put(self.resident, at, jnp.array(heads)))

    def resident_first(self, layer: LayerCache) -> Int32[Array, "B K 1"]:
        """Returns each head's first page in `resident`; negative: the head is not resident."""
        batch, heads = layer.lengths.shape
        nth = [self.heads.index(h) if h in self.heads else -1 for h in range(heads)]
        index = jnp.array(nth, jnp.int32)[None, :, None]
        row = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * len(self.heads)
        return jnp.where(index < 0, -1, (row + index) * layer.num_pages)

    def with_host(self, host: Array | None) -> "HostPool":
        """Returns the pool with these pages in host memory."""
        return replace(self, host=host)

    def take(self, rows: Int32[Array, "n"], batch: int) -> Self:
        """Returns the device arrays of some of `batch` rows, as a pool of their own."""

        def of_rows(pages: Array) -> Array:
            by_row = pages.reshape(batch, -1, *pages.shape[1:])
            return by_row[rows].reshape(-1, *pages.shape[1:])

        return self._map(of_rows)

    def put(self, part: Any, rows: Int32[Array, "n"], batch: int) -> Self:
        """Returns the pool with `part`, from `take`, written back to these rows."""

        def placed(pages: Array, new: Array) -> Array:
            by_row = pages.reshape(batch, -1, *pages.shape[1:])
            new = new.reshape(len(rows), -1, *pages.shape[1:])
            return by_row.at[rows].set(new).reshape(pages.shape)

        return self._map(placed, part)

    def _map(self, function: Callable[..., Array], *others: Self) -> Self:
        """Maps over the arrays on the device."""
        ring = function(self.ring, *(other.ring for other in others))
        if self.resident is None:
            return replace(self, ring=ring)
        resident = function(self.resident, *(other.resident for other in others))
        return replace(self, ring=ring, resident=resident)


def _pairs(layer: LayerCache) -> Int32[Array, "B K 1"]:
    batch, heads = layer.lengths.shape
    return jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1)


def first_pool(layer: LayerCache) -> HostPool:
    """Returns one of a layer's pools, which must be in host memory; all have the same pages."""
    k = layer.k.values if isinstance(layer.k, Int8Pages) else layer.k
    assert isinstance(k, HostPool)
    return k


def with_pools(function: Callable[[HostPool], Any], layer: LayerCache) -> LayerCache:
    """Returns a layer with the function's result in place of every pool in host memory."""
    return layer._replace(k=map_pages(function, layer.k), v=map_pages(function, layer.v))
