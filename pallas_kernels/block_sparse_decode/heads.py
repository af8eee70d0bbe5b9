"""Loads each head's share of the work, and whether its list has the newest token's page."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jsparse.pallas_kernels.block_sparse_decode import schedule
from jsparse.pallas_kernels.block_sparse_decode.problem import Problem
from jsparse.pallas_kernels.block_sparse_decode.refs import GlobalRefs


class Head(NamedTuple):
    """Scalars of one pair (row, KV head)."""

    splits: Any  # splits of the head
    tiles: Any  # tiles of its list, or of all its tokens if it is dense
    dense: Any  # nonzero: it attends to all tokens
    length: Any  # tokens in the cache
    count: Any  # listed pages


def load_head(p: Problem, g: GlobalRefs, h) -> Head:
    """Loads head h, or the last head if h is past the end."""
    h = jnp.minimum(h, p.pairs - 1)
    length, count = g.lengths[h], g.count[h]
    dense = g.dense[h] if p.has_dense else jnp.int32(0)
    tiles = schedule.num_tiles(length, count, dense, p.page_size, p.tiles)
    return Head(schedule.num_splits(tiles, p.tiles), tiles, dense, length, count)


def next_with_tiles(p: Problem, g: GlobalRefs, h, base, head: Head, ahead: Head):
    """Finds the first head from h on that has any tiles.

    `base` is the number of tiles before h, `head` is h, and `ahead` the head after it. Returns the
    same four values for the head found.
    """

    def step(carry):
        h, base, _, ahead = carry
        return h + 1, base, ahead, load_head(p, g, h + 2)  # no tiles, so base does not change

    return lax.while_loop(
        lambda c: (c[0] < p.pairs) & (c[2].tiles == 0), step, (h, base, head, ahead)
    )


def last_listed(p: Problem, g: GlobalRefs, h, head: Head):
    """Loads the last page of a head's list."""
    if not p.capacity:
        return jnp.int32(0)
    return g.ids[jnp.minimum(h, p.pairs - 1), jnp.clip(head.count - 1, 0, p.capacity - 1)]


def lacks_newest(p: Problem, g: GlobalRefs, h, head: Head, last):
    """Returns whether a list lacks the newest token's page; most lists end with it or before it."""
    if not p.capacity:
        return jnp.bool_(False)
    newest = lax.div(head.length - 1, p.page_size)
    sparse = head.dense == 0
    search = sparse & (last > newest)
    return sparse & lax.cond(search, lambda: _not_found(p, g, h, head), lambda: last < newest)


def _not_found(p: Problem, g: GlobalRefs, h, head: Head):
    """Searches a list that ends past its head's length for the newest token's page."""
    newest = lax.div(head.length - 1, p.page_size)

    def halve(bounds):
        low, high = bounds  # ids[low - 1] ≤ newest < ids[high]
        middle = lax.div(low + high, 2)
        beyond = g.ids[h, middle] > newest
        return jnp.where(beyond, low, middle + 1), jnp.where(beyond, middle, high)

    low, _ = lax.while_loop(lambda b: b[0] < b[1], halve, (jnp.int32(0), head.count))
    return (low == 0) | (g.ids[h, jnp.maximum(low - 1, 0)] != newest)
