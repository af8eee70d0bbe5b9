"""Shares out the work: tiles of tokens, splits of a head, shares of a block.

How a head's tiles are cut into splits depends on their number and the call's static parameters
alone, so a row gives bitwise the same alone and in a batch. Where heads are of one kind, the counts
of splits are such that heads of equal length fill the blocks of an H100 or H200 evenly: 66 splits
of each of 8 KV heads are 528 = 4 · 132. A team of warps takes the splits that begin in its equal
share of all tiles.

All of it runs in the kernel but `tiles` and `max_splits`; numbers of tiles and splits are scalars
or vectors of all heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

STRIDED = plgpu.Layout.WG_STRIDED
TOKENS = 64  # of a tile: rows of a wgmma


class Tiles(NamedTuple):
    """Holds the choices that depend on the machine.

    Attributes:
        blocks: persistent blocks of the grid.
        stages: tiles of a team on their way into shared memory.
        teams: teams per block, each a warpgroup that copies and one that multiplies.
        splits: counts of splits per head, descending; shorter heads are cut into fewer.
        min_tiles: least number of tiles per split.
        many: the same for heads that are cut into more than the last of `splits`.
    """

    blocks: int
    stages: int = 2  # three of 64 tokens were slower (bench/README.md)
    teams: int = 2  # two independent teams were faster than one (bench/README.md)
    splits: tuple[int, ...] = (66, 33, 16)
    min_tiles: int = 4
    many: int = 8

    @property
    def shares(self) -> int:
        """Returns the number of teams in all blocks."""
        return self.blocks * self.teams


def tiles(head_dim: int, mixed: bool = False) -> Tiles:
    """Returns the best schedule tried on an H200, scaled to this device's multiprocessors.

    Where some heads may list pages and others attend to all (`mixed`), a long head may be the only
    one and is cut finer, but into fewer splits than there are blocks: a team may take two splits
    that are a little shorter than its share. Head dimensions other than 128 were not tuned, but
    tried.
    """
    blocks = getattr(jax.local_devices()[0], "core_count", None) or 132  # 132: H100 and H200
    # 10 / 11 of 132 blocks are 120 splits, 48 us where 132 took 56 (bench/README.md)
    splits = (*((10 * blocks // 11,) if mixed else ()), blocks // 2, blocks // 4, blocks // 8)
    if head_dim > 128:
        return Tiles(blocks, teams=1, splits=splits)
    return Tiles(blocks, stages=4 if head_dim <= 64 else 2, splits=splits)


def max_splits(max_tiles: int, t: Tiles) -> int:
    """Returns the number of splits of `max_tiles` tiles, an int; no shorter head has more."""
    few = min(-(-max_tiles // t.min_tiles), t.splits[-1])
    return max(1, next((split for split in t.splits[:-1] if max_tiles >= split * t.many), few))


def num_tiles(length, count, dense, page_size: int, t: Tiles):
    """Returns the number of tiles of heads of `length` tokens that list `count` pages.

    Heads marked in `dense` read all their tokens; None: no head is dense.
    """
    tiles = _divided_up(count, TOKENS // page_size)
    if dense is not None:
        tiles = jnp.where(dense != 0, _divided_up(length, TOKENS), tiles)
    return jnp.where(length > 0, tiles, 0)


def num_splits(num_tiles, t: Tiles):
    """Returns the number of splits of heads of `num_tiles` tiles."""
    choice = jnp.minimum(_divided_up(num_tiles, t.min_tiles), t.splits[-1])
    for split in reversed(t.splits[:-1]):
        choice = jnp.where(num_tiles >= split * t.many, split, choice)
    return choice


def bounds(tiles, splits, nth):
    """Returns the first tile of the nth split and the first tile of the next."""
    splits = jnp.maximum(splits, 1)
    return lax.div(nth * tiles, splits), lax.div((nth + 1) * tiles, splits)


def beginning(tiles, splits, before):
    """Returns how many splits begin before the head's tile `before`, which may be any number."""
    tiles = jnp.maximum(tiles, 1)
    return jnp.maximum(lax.div(jnp.minimum(before, tiles) * splits + tiles - 1, tiles), 0)


def find(num_tiles, pairs: int, starts, sums):
    """Finds the heads whose tiles include the tiles `starts` of all, and their first tiles.

    `num_tiles` is the vector of all heads, and `sums` adds up the numbers of each of some vectors.
    The search goes bit by bit of a head's index. On 256 heads of 64 to 16K tokens it took the
    kernel from 154 us, with a loop over all heads, to 130 (bench/README.md).
    """
    index = plgpu.broadcasted_iota(
        jnp.int32, num_tiles.shape, 0, layout=STRIDED(num_tiles.shape, 1)
    )
    heads, bases = [jnp.int32(0)] * len(starts), [jnp.int32(0)] * len(starts)
    for bit in reversed(range((pairs - 1).bit_length())):
        trials = [head | (1 << bit) for head in heads]
        before = sums(*(jnp.where(index < trial, num_tiles, 0) for trial in trials))
        for i, start in enumerate(starts):
            heads[i] = jnp.where(before[i] <= start, trials[i], heads[i])
            bases[i] = jnp.where(before[i] <= start, before[i], bases[i])
    return heads, bases


def _divided_up(a, b: int):
    return lax.div(a + (b - 1), b)
