"""What the copying warpgroup knows of heads: their share of the work, and whether they list their
newest token.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jsparse.pallas_kernels.block_sparse_decode import schedule
from jsparse.pallas_kernels.block_sparse_decode.problem import Problem


class Head(NamedTuple):
    """What is known of a pair: its share of the work, whether it is dense, the last page of its
    list.
    """

    splits: Any
    tiles: Any
    dense: Any
    last: Any
    length: Any
    count: Any


def load_head(p: Problem, g: dict, h) -> Head:
    """Of head h, or of the last one, where h is beyond."""
    h = jnp.minimum(h, p.pairs - 1)
    length, count = g["lengths"][h], g["count"][h]
    dense = g["dense"][h] if p.has_dense else jnp.int32(0)
    last = g["ids"][h, jnp.clip(count - 1, 0, p.capacity - 1)] if p.capacity else jnp.int32(0)
    tiles = schedule.num_tiles(length, count, dense, p.page_size, p.tiles)
    return Head(schedule.num_splits(tiles, p.tiles), tiles, dense, last, length, count)


def next_with_tiles(p: Problem, g: dict, h, base, head: Head, ahead: Head):
    """The first of h and those after it that has any tiles, the tiles before it, it, and the one
    after it.

    `base` tiles are before h, `head` is h, `ahead` the one after it.
    """

    def step(carry):
        h, base, _, ahead = carry
        return h + 1, base, ahead, load_head(p, g, h + 2)

    return lax.while_loop(
        lambda c: (c[0] < p.pairs) & (c[2].tiles == 0), step, (h, base, head, ahead)
    )


def lacks_newest(p: Problem, g: dict, h, head: Head):
    """Whether a list is without the page of the newest token; most lists end with it, or before."""
    if not p.capacity:
        return jnp.bool_(False)
    newest = lax.div(head.length - 1, p.page_size)
    sparse = head.dense == 0
    search = sparse & (head.last > newest)
    return sparse & lax.cond(search, lambda: _not_found(p, g, h, head), lambda: head.last < newest)


def _not_found(p: Problem, g: dict, h, head: Head):
    """Searches a list that ends past what its head holds for the page of the newest token."""
    newest = lax.div(head.length - 1, p.page_size)

    def halve(bounds):
        low, high = bounds  # ids[low - 1] ≤ newest < ids[high]
        middle = lax.div(low + high, 2)
        beyond = g["ids"][h, middle] > newest
        return jnp.where(beyond, low, middle + 1), jnp.where(beyond, middle, high)

    low, _ = lax.while_loop(lambda b: b[0] < b[1], halve, (jnp.int32(0), head.count))
    return (low == 0) | (g["ids"][h, jnp.maximum(low - 1, 0)] != newest)
