"""Holds K and V of rows that share their pages, which the host hands out in groups.

Group g holds pages g·K to g·K + K - 1 of every layer, one per KV head. The groups and lengths of a
row are the same in all layers, so one table serves them all.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache, LayerCache, SharedPrefixes
from jsparse.shapes import Pages, Rows


class Pool(NamedTuple):
    """Holds one layer's pages, [G·K, P, H] each."""

    k: Pages
    v: Pages


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("pools", "groups", "lengths", "prefixes"),
    meta_fields=("num_kv_heads",),
)
@dataclass(frozen=True)
class SharedPages:
    """Holds the pages of all rows, and which of them each row has.

    Attributes:
        pools: K and V, per layer.
        groups: the groups of each row, in the order of its tokens.
        lengths: the number of tokens that each row holds.
        num_kv_heads: K.
        prefixes: which rows have their first pages in common, if a program is to know.
    """

    pools: tuple[Pool, ...]
    groups: Int32[Array, "B M"]
    lengths: Rows
    num_kv_heads: int
    prefixes: SharedPrefixes | None = None

    def of_rows(self, active: Bool[Array, "B"] | None = None) -> KVCache:
        """Returns the cache that policies know; rows that are not active are empty there."""
        lengths = self.lengths if active is None else jnp.where(active, self.lengths, 0)
        head = jnp.arange(self.num_kv_heads, dtype=jnp.int32)[:, None]
        table = self.groups[:, None] * self.num_kv_heads + head
        by_head = jnp.broadcast_to(lengths[:, None], table.shape[:2])
        layers = tuple(
            LayerCache(pool.k, pool.v, by_head, table, prefixes=self.prefixes)
            for pool in self.pools
        )
        return KVCache(layers, lengths, jnp.zeros(lengths.shape, jnp.bool_))

    def after(self, cache: KVCache, longer: Bool[Array, "B"] | Rows | None = None) -> "SharedPages":
        """Returns the pages after a program that took `of_rows`; rows are so many tokens longer."""
        pools = tuple(Pool(*layer.arrays) for layer in cache.layers)
        lengths = self.lengths if longer is None else self.lengths + longer
        return replace(self, pools=pools, lengths=lengths)

    def rows(self, groups: Int32[Array, "n M"], lengths: Rows) -> "SharedPages":
        """Returns rows with these groups over the same pages."""
        return replace(self, groups=groups, lengths=lengths, prefixes=None)

    def with_prefixes(self, prefixes: SharedPrefixes | None) -> "SharedPages":
        """Returns the same rows, of which `prefixes` says what they have in common."""
        return replace(self, prefixes=prefixes)

    def with_groups(
        self, rows: Int32[Array, "n 1"], places: Int32[Array, "n m"], groups: Int32[Array, "n m"]
    ) -> "SharedPages":
        """Returns the pages with groups in these places of rows; those out of range are ignored."""
        return replace(self, groups=self.groups.at[rows, places].set(groups))

    def take(self, rows: Int32[Array, "n"]) -> "SharedPages":
        """Returns some rows as a batch of their own, over the same pages."""
        return self.rows(self.groups[rows], self.lengths[rows])

    def put(self, part: "SharedPages", rows: Int32[Array, "n"]) -> "SharedPages":
        """Returns all rows, with those of `part` in these places, and the pages of `part`."""
        groups = self.groups.at[rows].set(part.groups)
        return part.rows(groups, self.lengths.at[rows].set(part.lengths))


def scratch_group(spec: CacheSpec) -> int:
    """Returns the group that has no owner, the last."""
    return spec.pages // spec.num_kv_heads - 1


def empty_pages(spec: CacheSpec) -> SharedPages:
    """Returns empty rows, all of whose groups are the last one, which has no owner."""
    return SharedPages(
        tuple(Pool(*layer.arrays) for layer in kv_cache.init(spec).layers),
        jnp.full((spec.batch, spec.num_pages), scratch_group(spec), jnp.int32),
        jnp.zeros(spec.batch, jnp.int32),
        spec.num_kv_heads,
    )
