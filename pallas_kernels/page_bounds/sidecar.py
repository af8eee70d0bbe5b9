"""The least and greatest value of every channel in every page of K: how they are built and kept up to date."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jsparse.cache import CacheSpec, LayerCache, physical_pages, read_pages
from jsparse.shapes import Lengths, Rows


class PageBounds(NamedTuple):
    """One layer's bounds, indexed by physical page, in K's dtype. Those of a page without tokens mean nothing."""

    low: Float[Array, "pages H"]
    high: Float[Array, "pages H"]


def init(spec: CacheSpec, *, pool_pages: int | None = None) -> PageBounds:
    """The bounds of one layer that holds nothing; `pool_pages` as for the cache's own init."""
    pages = spec.batch * spec.num_kv_heads * spec.num_pages if pool_pages is None else pool_pages
    return PageBounds(*(jnp.zeros((pages, spec.head_dim), spec.dtype) for _ in PageBounds._fields))


def append(bounds: PageBounds, layer: LayerCache, valid: Rows, first: Lengths, *, max_new: int) -> PageBounds:
    """Takes in the first `valid[b]` tokens at the slots first, first + 1, … of each head of row b.

    `layer` must hold them already, and its lengths must count them. The pages that they touch are computed afresh from
    K, so that a token written again leaves nothing behind; no other page is read or written.

    Args:
        bounds: as they stood.
        layer: the cache's layer.
        valid: how many slots of each row were written.
        first: the first slot of each head that was.
        max_new: T, the most that `valid` can be; static.
    """
    size = layer.page_size
    # T slots that do not start on a page's edge touch one page more
    pages = first[..., None] // size + jnp.arange((max_new + size - 2) // size + 1, dtype=jnp.int32)
    end = jnp.minimum(first + valid[:, None], layer.lengths)[..., None]
    touched = (pages >= 0) & (pages < layer.num_pages) & (pages * size < end) & (valid > 0)[:, None, None]
    logical = jnp.where(touched, pages, 0)
    at = jnp.where(touched, physical_pages(layer, logical), layer.k.shape[0])  # out of range: dropped
    k = read_pages(layer.k, layer, logical)
    held = _held(logical, layer)[..., None]
    low = jnp.min(jnp.where(held, k, jnp.inf), axis=3).astype(k.dtype)
    high = jnp.max(jnp.where(held, k, -jnp.inf), axis=3).astype(k.dtype)
    return PageBounds(bounds.low.at[at].set(low, mode="drop"), bounds.high.at[at].set(high, mode="drop"))


def _held(logical: Int32[Array, "B K n"], layer: LayerCache) -> Bool[Array, "B K n P"]:
    """Which slots of these pages hold a token."""
    slots = logical[..., None] * layer.page_size + jnp.arange(layer.page_size, dtype=jnp.int32)
    return slots < layer.lengths[..., None, None]
