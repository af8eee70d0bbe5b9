"""How the work is shared: tiles of tokens, splits of a head, shares of a block.

A head's tiles are cut into splits by their own number alone, so a row gives bitwise the same alone and in a batch. The
counts of splits are such that heads of equal length fill the blocks of an H100 or H200 evenly: 66 splits of each of 8
KV heads are 528 = 4 · 132. A team of warps takes the splits that begin in its equal share of all tiles.

`plan` is a small XLA op before the launch; `find`, `bounds` run in it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from jsparse.cache import LayerCache
from jsparse.selection import Selection

WARPGROUP = 128
LISTED, MISSING, SEARCH, DENSE = range(4)
STRIDED = plgpu.Layout.WG_STRIDED


class Tiles(NamedTuple):
    """The choices that a machine wants.

    Attributes:
        blocks: persistent blocks of the grid.
        tokens: of a tile.
        stages: tiles of a team on their way into shared memory.
        teams: of a block: a warpgroup that copies and one that multiplies.
        splits: into how many a head may be cut, descending; shorter heads are cut into fewer.
        least: tiles of a split, at least.
        many: the same of heads that are cut into more than the last of `splits`.
    """

    blocks: int
    tokens: int = 64
    stages: int = 2
    teams: int = 2
    splits: tuple[int, ...] = (132, 66, 33, 16)
    least: int = 4
    many: int = 12

    @property
    def shares(self) -> int:
        """Teams of all blocks."""
        return self.blocks * self.teams


def tiles(head_dim: int) -> Tiles:
    """The choice for this device: the best of some trial runs on an H200, scaled by its multiprocessors."""
    blocks = getattr(jax.local_devices()[0], "core_count", None) or 132
    splits = (blocks, blocks // 2, blocks // 4, blocks // 8)
    if head_dim > 128:
        return Tiles(blocks, tokens=32, stages=3, teams=1, splits=splits)
    return Tiles(blocks, stages=4 if head_dim <= 64 else 2, splits=splits)


def max_splits(max_tiles: int, t: Tiles) -> int:
    """The splits of a head of `max_tiles` tiles, as a Python integer; no shorter head has more."""
    few = min(-(-max_tiles // t.least), t.splits[-1])
    return max(1, next((most for most in t.splits[:-1] if max_tiles >= most * t.many), few))


def num_splits(num_tiles, t: Tiles):
    """Splits of heads of that many tiles."""
    choice = jnp.minimum(-(-num_tiles // t.least), t.splits[-1])
    for most in reversed(t.splits[:-1]):
        choice = jnp.where(num_tiles >= most * t.many, most, choice)
    return choice


def bounds(tiles, splits, nth):
    """The first tile of the nth split and the first of the next."""
    splits = jnp.maximum(splits, 1)
    return lax.div(nth * tiles, splits), lax.div((nth + 1) * tiles, splits)


def beginning(tiles, splits, before):
    """How many splits begin before that tile of the head, which may be any number."""
    tiles = jnp.maximum(tiles, 1)
    return jnp.maximum(lax.div(jnp.minimum(before, tiles) * splits + tiles - 1, tiles), 0)


def plan(layer: LayerCache, selection: Selection, t: Tiles) -> Int32[Array, "3 padded"]:
    """What a launch must know of every pair: its splits, its tiles and its kind.

    DENSE heads have no list. Others list the page of their newest token (LISTED) or not (MISSING), or their list must
    be searched for it (SEARCH), since it ends past what they hold. Padded by zeros to a multiple of the 128 threads of
    a warpgroup.
    """
    lengths, ids, count, dense = layer.lengths, selection.ids, selection.count, selection.dense
    num_tiles = -(-count // (t.tokens // layer.page_size))
    kind = jnp.full_like(lengths, LISTED)
    if ids.shape[-1]:
        last = jnp.take_along_axis(ids, jnp.maximum(count - 1, 0)[..., None], axis=2, mode="clip")[..., 0]
        page = (lengths - 1) // layer.page_size
        kind = jnp.where(last == page, LISTED, jnp.where(last < page, MISSING, SEARCH))
    if dense is not None:
        num_tiles = jnp.where(dense, -(-lengths // t.tokens), num_tiles)
        kind = jnp.where(dense, DENSE, kind)
    num_tiles = jnp.where(lengths > 0, num_tiles, 0)
    rows = jnp.stack([num_splits(num_tiles, t), num_tiles, kind]).reshape(3, -1)
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % WARPGROUP)))


def find(num_tiles, pairs: int, starts):
    """The heads whose tiles include the tiles `starts` of all, and their first tiles.

    `num_tiles` is the vector of all heads. A search by bits, each a sum over the warpgroup.
    """
    index = plgpu.broadcasted_iota(jnp.int32, num_tiles.shape, 0, layout=STRIDED(num_tiles.shape, 1))
    heads, bases = [jnp.int32(0)] * len(starts), [jnp.int32(0)] * len(starts)
    for bit in reversed(range((pairs - 1).bit_length())):
        for i, start in enumerate(starts):
            trial = heads[i] | (1 << bit)
            before = jnp.sum(jnp.where(index < trial, num_tiles, 0))
            heads[i] = jnp.where(before <= start, trial, heads[i])
            bases[i] = jnp.where(before <= start, before, bases[i])
    return heads, bases
