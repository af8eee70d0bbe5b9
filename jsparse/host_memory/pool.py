"""Defines HostPool: a layer's K or V in host memory, the newest tokens on the device.

A page is read from the tail, a ring of R pages per head on the device, where it is one of the
newest R that the head holds, and from host memory otherwise. Nothing but the head's length says
which. Whoever writes tokens must have stored a page in host memory before the ring takes its place
(`stored`), and nothing else is ever written there.

Pages in host memory are not part of the cache: programs borrow them (`jsparse.cache.with_host`), so
that no donated buffer is ever one of them. The heads that attend to everything in every step can
have all their pages on the device, too.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Int32

from jsparse.cache import CacheSpec, HostPages, KVCache, LayerCache, PagePool, physical_pages, write
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.pallas_kernels.row_scatter import row_scatter
from jsparse.shapes import ChunkKV, Lengths, Rows, Tokens

GatherFn = Callable[..., Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ring", "host", "resident"),
    meta_fields=("pages", "heads"),
)
@dataclass(frozen=True)
class HostPool(PagePool):
    """Holds K or V of one layer.

    Attributes:
        ring: [B·K·R, P, H] on the device; page m of a head is page m mod R of its ring.
        host: [pages, P, H] in host memory, or None between programs: then only the ring is
            read.
        resident: [B·n·M, P, H] on the device, all pages of the n KV heads `heads`; None if there
            are none.
        pages: the number of pages in host memory.
        heads: the KV heads that are resident, ascending.
    """

    ring: Array
    host: Array | None
    resident: Array | None
    pages: int
    heads: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns [pages, P, H], the shape that an array in one memory would have."""
        _, page_size, head_dim = self.ring.shape
        return self.pages, page_size, head_dim

    @property
    def dtype(self) -> Any:
        """Returns the type of the values."""
        return self.ring.dtype

    def ring_pages(self, layer: LayerCache) -> int:
        """Returns R."""
        return self.ring.shape[0] // layer.lengths.size

    def on_ring(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Bool[Array, "B K n"]:
        """Marks the pages that are read from the ring."""
        newest = (layer.lengths - 1) // layer.page_size
        return logical > newest[..., None] - self.ring_pages(layer)

    def ring_at(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Int32[Array, "B K n"]:
        """Returns the places of pages in the ring, whether they are there or not."""
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
        gather: GatherFn = row_gather,
    ) -> Array | None:
        """Returns what host memory has of the first `count` slots, or pages if offset is None.

        The others, and those in the ring, are zeros. `gather` does what `row_gather` does.
        """
        if self.host is None:
            return None
        at, row_axes = physical_pages(layer, page), 1
        if offset is not None:
            at, row_axes = at * layer.page_size + offset, 2
        return gather(
            self.host, jnp.where(self.on_ring(layer, page), -1, at), count, row_axes=row_axes
        )

    def with_ring(
        self,
        layer: LayerCache,
        page: Int32[Array, "B K n"],
        offset: Int32[Array, "B K n"] | None,
        fetched: Array | None,
    ) -> Array:
        """Returns what `fetched` returned, with the slots or pages that lie in the ring."""
        at = self.ring_at(layer, page)
        ring = self.ring[at] if offset is None else self.ring[at, offset]
        if fetched is None:
            return ring
        here = self.on_ring(layer, page)
        return jnp.where(here.reshape(*here.shape, *(1,) * (ring.ndim - here.ndim)), ring, fetched)

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
        """Returns each head's first page in `resident`; negative for heads that are not there."""
        batch, heads = layer.lengths.shape
        nth = [self.heads.index(h) if h in self.heads else -1 for h in range(heads)]
        own = jnp.array(nth, jnp.int32)[None, :, None]
        row = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * len(self.heads)
        return jnp.where(own < 0, -1, (row + own) * layer.num_pages)

    def with_host(self, host: Array | None) -> "HostPool":
        """Returns the pool with these pages in host memory."""
        return replace(self, host=host)


def _pairs(layer: LayerCache) -> Int32[Array, "B K 1"]:
    batch, heads = layer.lengths.shape
    return jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1)


def pools(layer: LayerCache) -> tuple[HostPool, HostPool]:
    """Returns a layer's pools of K and V, which must be in host memory."""
    k, v = layer.k, layer.v
    assert isinstance(k, HostPool)
    assert isinstance(v, HostPool)
    return k, v


def in_tail(layer: LayerCache, ring_pages: int, heads: tuple[int, ...] = ()) -> LayerCache:
    """Returns an empty layer whose K and V lie in host memory, with rings of that many pages.

    Resident heads' pages are those of the layer, which has the identity table.
    """
    batch, kv_heads = layer.lengths.shape

    def pool(pages: Array) -> HostPool:
        shape = (batch, kv_heads, layer.num_pages, *pages.shape[1:])
        own = pages.reshape(shape)[:, list(heads)] if heads else None
        return HostPool(
            ring=jnp.zeros((batch * kv_heads * ring_pages, *pages.shape[1:]), pages.dtype),
            host=None,
            resident=None if own is None else own.reshape(-1, *pages.shape[1:]),
            pages=pages.shape[0],
            heads=heads,
        )

    k, v = map(pool, layer.arrays)
    return layer._replace(k=k, v=v)


def refilled(layer: LayerCache) -> LayerCache:
    """Returns a layer with the newest pages of every head in its ring, as host memory has them."""
    k, v = pools(layer)
    size = k.ring_pages(layer)
    newest = (layer.lengths[..., None] - 1) // layer.page_size
    pages = newest - jnp.arange(size, dtype=jnp.int32)
    ids = jnp.where(pages >= 0, physical_pages(layer, jnp.maximum(pages, 0)), -1)
    at = jnp.where(pages >= 0, k.ring_at(layer, pages), k.ring.shape[0])

    def ring(pool: HostPool) -> HostPool:
        assert pool.host is not None
        rows = row_gather(pool.host, ids)
        return replace(pool, ring=pool.ring.at[at].set(rows, mode="drop"))

    return layer._replace(k=ring(k), v=ring(v))


def whole(
    layer: LayerCache,
    q: Array,
    new: tuple[ChunkKV, ChunkKV],
    positions: Tokens,
    valid: Rows,
) -> tuple[LayerCache, Array]:
    """Returns a layer with all of K and V on the device, or as it is if it lies there, and q.

    What was held before the first `valid[b]` of the new tokens comes from host memory, once the
    queries q are there, so that no two layers are on the device for long. (XLA drops the order of
    the two unless the q that is returned is used.)
    """
    if layer.page_pools is None:
        return layer, q
    k, v = pools(layer)
    first = layer.lengths - valid[:, None]
    count = (first + layer.page_size - 1) // layer.page_size
    pages = jnp.arange(layer.num_pages, dtype=jnp.int32)
    ids = physical_pages(layer, jnp.broadcast_to(pages, (*count.shape, pages.size)))
    ids, q = jax.lax.optimization_barrier((ids, q))

    def fetched(pool: HostPool) -> Array:
        assert pool.host is not None
        return row_gather(pool.host, ids, count).reshape(pool.shape)

    held = layer._replace(k=fetched(k), v=fetched(v))
    return write(held, *new, positions, valid, first), q


def newest_pages(
    layer: LayerCache, first: Lengths, max_new: int
) -> tuple[Int32[Array, "B K n"], tuple[Array, Array]]:
    """Returns the pages of the tokens from `first` on, at most `max_new`, and their K and V.

    Ids are physical; -1 is none.
    """
    k, v = pools(layer)
    count = min(-(-max_new // layer.page_size) + 1, k.ring_pages(layer))
    page = first[..., None] // layer.page_size + jnp.arange(count, dtype=jnp.int32)
    held = page * layer.page_size < layer.lengths[..., None]
    ids = jnp.where(held, physical_pages(layer, jnp.minimum(page, layer.num_pages - 1)), -1)
    at = k.ring_at(layer, page)
    return ids, (k.ring[at], v.ring[at])


def host_sharding() -> SingleDeviceSharding:
    """Returns where pages in host memory lie; on a CPU it is the memory of everything.

    Raises:
        ValueError: the default device can address no pinned host memory.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return SingleDeviceSharding(device)
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise ValueError(
            f"device {device.device_kind}: must address pinned_host memory for K and V on the "
            f"host, and addresses {kinds}"
        )
    return SingleDeviceSharding(device, memory_kind="pinned_host")


@functools.cache
def _programs() -> tuple[Any, Any]:
    """Returns the jitted functions that make pages in host memory and write into them."""
    place = host_sharding()

    def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.zeros(shape, dtype)

    return (
        jax.jit(zeros, static_argnums=(0, 1), out_shardings=place),
        jax.jit(row_scatter, donate_argnums=0, out_shardings=place),
    )


def empty_pages(spec: CacheSpec) -> tuple[HostPages, ...]:
    """Returns all layers' pages in host memory, zeros."""
    make, shape = _programs()[0], (spec.pages, spec.page_size, spec.head_dim)

    def pages() -> Array:
        # zeros are made on the device: one array after the other
        return make(shape, jnp.dtype(spec.dtype)).block_until_ready()

    return tuple(HostPages(pages(), pages()) for _ in range(spec.num_layers))


@functools.partial(jax.jit, static_argnames="max_new")
def _leaving(
    layer: LayerCache, count: Rows, max_new: int
) -> tuple[Int32[Array, "B K n"], tuple[Array, Array]]:
    return newest_pages(layer, jnp.maximum(layer.lengths - count[:, None], 0), max_new)


def stored(
    host: Sequence[HostPages], cache: KVCache, count: Rows, max_new: int
) -> tuple[HostPages, ...]:
    """Writes the pages of each row's newest `count[b]` ≤ `max_new` tokens into host memory.

    `host` is donated and written in place.
    """
    put = _programs()[1]

    def of_layer(pages: HostPages, layer: LayerCache) -> HostPages:
        ids, (k, v) = _leaving(layer, count, max_new=max_new)
        return HostPages(put(pages.k, ids, k), put(pages.v, ids, v))

    return tuple(map(of_layer, host, cache.layers))


def moved(cache: KVCache) -> tuple[HostPages, ...]:
    """Returns the pages of a cache on the device, copied to host memory."""
    place = host_sharding()
    return tuple(
        HostPages(*(jax.device_put(x, place, may_alias=False) for x in pages))
        for pages in ((layer.k, layer.v) for layer in cache.layers)
    )
