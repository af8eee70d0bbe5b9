"""K and V of rows that share their pages, which the host allocates in page groups.

Group g holds pages g·K to g·K + K - 1 of every layer, one per KV head. The groups and lengths of a
row are the same in all layers, so one table serves all layers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache, LayerCache, PagePool, SharedPrefixes
from jsparse.shapes import BlockTable, Pages, Rows


class Pool(NamedTuple):
    """One layer's pages, [G·K, P, H] of K and V, and the optional fields of their slots.

    If the pages are in host memory, rows have their newest tokens on the device (PagePool).
    """

    k: Pages | PagePool
    v: Pages | PagePool
    bias: Float32[Array, "pages P"] | None = None
    slot_positions: Int32[Array, "pages P"] | None = None

    @classmethod
    def of(cls, layer: LayerCache) -> "Pool":
        """Returns the pages of a layer."""
        return cls(layer.k, layer.v, layer.bias, layer.slot_positions)

    def take(self, rows: Int32[Array, "n"], batch: int) -> "Pool":
        """Returns the pages, with the per-row arrays of these rows; the pool has `batch` rows."""
        if not (isinstance(self.k, PagePool) and isinstance(self.v, PagePool)):
            return self
        return self._replace(k=self.k.take(rows, batch), v=self.v.take(rows, batch))

    def put(self, part: "Pool", rows: Int32[Array, "n"], batch: int) -> "Pool":
        """Returns the pages of `part`, and puts its per-row arrays into these rows."""
        if not (isinstance(self.k, PagePool) and isinstance(self.v, PagePool)):
            return part
        assert isinstance(part.k, PagePool)
        assert isinstance(part.v, PagePool)
        return self._replace(k=self.k.put(part.k, rows, batch), v=self.v.put(part.v, rows, batch))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("pools", "groups", "lengths", "head_lengths", "prefixes"),
    meta_fields=("num_kv_heads",),
)
@dataclass(frozen=True)
class SharedPages:
    """The pages of all rows, and the page groups of each row.

    Attributes:
        pools: K and V, per layer.
        groups: the page groups of each row, in the order of its tokens.
        lengths: the number of tokens of each row, and of its heads if `head_lengths` is None.
        num_kv_heads: K.
        head_lengths: the number of tokens of each head, for policies that evict.
        prefixes: the rows that share their first pages, for programs that use it.
    """

    pools: tuple[Pool, ...]
    groups: Int32[Array, "B M"]
    lengths: Rows
    num_kv_heads: int
    head_lengths: Int32[Array, "L B K"] | None = None
    prefixes: SharedPrefixes | None = None

    def of_rows(self, active: Bool[Array, "B"] | None = None) -> KVCache:
        """Returns the cache as policies see it; inactive rows are empty there."""
        lengths = self.lengths if active is None else jnp.where(active, self.lengths, 0)
        table = self.table
        if self.head_lengths is None:
            by_head = (jnp.broadcast_to(lengths[:, None], table.shape[:2]),) * len(self.pools)
        else:
            by_head = (
                self.head_lengths
                if active is None
                else jnp.where(active[:, None], self.head_lengths, 0)
            )
        layers = tuple(
            LayerCache(
                *(pool.k, pool.v, own, table),
                bias=pool.bias,
                slot_positions=pool.slot_positions,
                prefixes=self.prefixes,
            )
            for pool, own in zip(self.pools, by_head, strict=True)
        )
        return KVCache(layers, lengths, jnp.zeros(lengths.shape, jnp.bool_))

    def after(self, cache: KVCache, longer: Bool[Array, "B"] | Rows | None = None) -> "SharedPages":
        """Returns the pages after a program that ran on `of_rows`; rows grow by `longer` tokens."""
        pools = tuple(map(Pool.of, cache.layers))
        lengths = self.lengths if longer is None else self.lengths + longer
        if self.head_lengths is None:
            return replace(self, pools=pools, lengths=lengths)
        head_lengths = _head_lengths(cache)
        if longer is not None:
            head_lengths = jnp.where(longer[:, None] > 0, head_lengths, self.head_lengths)
        return replace(self, pools=pools, lengths=lengths, head_lengths=head_lengths)

    @property
    def table(self) -> BlockTable:
        """The pages of each row, by head."""
        return self._by_head(self.groups)

    def _by_head(self, groups: Int32[Array, "n m"]) -> Int32[Array, "n K m"]:
        """Returns the pages of groups, by head."""
        head = jnp.arange(self.num_kv_heads, dtype=jnp.int32)[:, None]
        return groups[:, None] * self.num_kv_heads + head

    def emptied(self, rows: Bool[Array, "B"]) -> "SharedPages":
        """Returns all rows, with these rows emptied: no tokens and no groups."""
        scratch = self.pools[0].k.shape[0] // self.num_kv_heads - 1
        return replace(
            self,
            groups=jnp.where(rows[:, None], scratch, self.groups),
            lengths=jnp.where(rows, 0, self.lengths),
            head_lengths=None
            if self.head_lengths is None
            else jnp.where(rows[:, None], 0, self.head_lengths),
        )

    def with_pages_of(self, part: "SharedPages") -> "SharedPages":
        """Returns the same rows over the pages of a part."""
        return replace(self, pools=part.pools)

    def by_head(self, cache: KVCache) -> "SharedPages":
        """Returns the rows with the head lengths and the pages of `cache`."""
        return replace(
            self, pools=tuple(map(Pool.of, cache.layers)), head_lengths=_head_lengths(cache)
        )

    def rows(self, groups: Int32[Array, "n M"], lengths: Rows) -> "SharedPages":
        """Returns rows with these groups over the same pages; all heads hold the same tokens."""
        return replace(self, groups=groups, lengths=lengths, head_lengths=None, prefixes=None)

    def with_prefixes(self, prefixes: SharedPrefixes | None) -> "SharedPages":
        """Returns the same rows with these shared prefixes."""
        return replace(self, prefixes=prefixes)

    def with_groups(
        self, rows: Int32[Array, "n 1"], places: Int32[Array, "n m"], groups: Int32[Array, "n m"]
    ) -> "SharedPages":
        """Returns the rows with groups at these indices replaced; out-of-range ones are ignored."""
        return replace(self, groups=self.groups.at[rows, places].set(groups))

    def take(self, rows: Int32[Array, "n"]) -> "SharedPages":
        """Returns some rows as a separate batch over the same pages."""
        head_lengths = None if self.head_lengths is None else self.head_lengths[:, rows]
        pools = tuple(pool.take(rows, len(self.lengths)) for pool in self.pools)
        taken = self.rows(self.groups[rows], self.lengths[rows])
        return replace(taken, pools=pools, head_lengths=head_lengths)

    def put(self, part: "SharedPages", rows: Int32[Array, "n"]) -> "SharedPages":
        """Returns all rows, with those of `part` at these indices, and the pages of `part`."""
        head_lengths = self.head_lengths
        if head_lengths is not None and part.head_lengths is not None:
            head_lengths = head_lengths.at[:, rows].set(part.head_lengths)
        pools = (
            own.put(new, rows, len(self.lengths))
            for own, new in zip(self.pools, part.pools, strict=True)
        )
        placed = self.placed(rows, part.groups, part.lengths)
        return replace(placed, pools=tuple(pools), head_lengths=head_lengths)

    def placed(
        self, rows: Int32[Array, "n"], groups: Int32[Array, "n M"], lengths: Rows
    ) -> "SharedPages":
        """Returns all rows, these with other groups and lengths; heads hold the same tokens."""
        groups = self.groups.at[rows].set(groups)
        return self.rows(groups, self.lengths.at[rows].set(lengths))

    def copied(self, old: Int32[Array, "n m"], new: Int32[Array, "n m"]) -> "SharedPages":
        """Returns the pages after copying the groups `old` to the groups `new`."""
        return self.put_groups(new, self.take_groups(old))

    def take_groups(self, groups: Int32[Array, "n m"]) -> tuple[Pool, ...]:
        """Returns a copy of the pages of these groups."""
        pages = self.pages_of(groups)
        return jax.tree.map(lambda pool: pool[pages], self.pools)

    def put_groups(self, groups: Int32[Array, "n m"], taken: tuple[Pool, ...]) -> "SharedPages":
        """Returns the pages with the copies from `take_groups` in these groups."""
        pages = self.pages_of(groups)
        pools = jax.tree.map(lambda pool, new: pool.at[pages].set(new), self.pools, taken)
        return replace(self, pools=pools)

    def pages_of(self, groups: Int32[Array, "n m"]) -> Int32[Array, "pages"]:
        """Returns the pages of groups."""
        return self._by_head(groups).reshape(-1)


def _head_lengths(cache: KVCache) -> Int32[Array, "L B K"]:
    return jnp.stack([layer.lengths for layer in cache.layers])


def scratch_group(spec: CacheSpec) -> int:
    """Returns the scratch group, the last one, which belongs to no row."""
    return spec.pages // spec.num_kv_heads - 1


def empty_pages(
    spec: CacheSpec, *, fields: tuple[str, ...] = (), by_head: bool = False
) -> SharedPages:
    """Returns empty rows; all of their groups are the scratch group.

    Args:
        spec: the sizes.
        fields: the optional fields of the cache to allocate.
        by_head: whether heads will hold different tokens.
    """
    pools = tuple(map(Pool.of, kv_cache.init(spec, fields=fields).layers))
    return empty_rows(spec, pools, by_head=by_head)


def empty_rows(spec: CacheSpec, pools: tuple[Pool, ...], *, by_head: bool = False) -> SharedPages:
    """Returns empty rows over existing pools; see `empty_pages`."""
    heads = spec.num_layers, spec.batch, spec.num_kv_heads
    return SharedPages(
        pools,
        jnp.full((spec.batch, spec.num_pages), scratch_group(spec), jnp.int32),
        jnp.zeros(spec.batch, jnp.int32),
        spec.num_kv_heads,
        head_lengths=jnp.zeros(heads, jnp.int32) if by_head else None,
    )
