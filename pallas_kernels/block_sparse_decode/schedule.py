"""Divides the work into tiles of tokens, splits of a head, and shares of a block.

The number of splits of a head depends only on its number of tiles and on static parameters, so a
row's result is bitwise the same alone and in a batch. If all heads are of one kind, the numbers of
splits let heads of equal length fill the blocks of an H100 or H200 evenly: 66 splits of each of 8
KV heads are 528 = 4 · 132. A team takes the splits that start in its equal share of all tiles.

All of it except `tiles` and `max_splits` runs in the kernel. Numbers of tiles and splits are
scalars, or vectors of all heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

STRIDED = plgpu.Layout.WG_STRIDED
TOKENS = 64  # tokens per tile: rows of a wgmma


class Tiles(NamedTuple):
    """Choices that depend on the GPU.

    Attributes:
        blocks: persistent blocks of the grid.
        stages: a team's tiles in flight to shared memory.
        teams: teams per block, each a copying and a multiplying warpgroup.
        splits: numbers of splits per head, descending; shorter heads have fewer.
        min_tiles: minimum tiles per split.
        many: minimum tiles per split for heads with more splits than the last of `splits`.
    """

    blocks: int
    stages: int = 2  # three stages of 64 tokens were slower (bench/README.md)
    teams: int = 2  # two independent teams were faster than one (bench/README.md)
    splits: tuple[int, ...] = (66, 33, 16)
    min_tiles: int = 4
    many: int = 8

    @property
    def shares(self) -> int:
        """The number of teams in all blocks."""
        return self.blocks * self.teams


def tiles(head_dim: int, mixed: bool = False) -> Tiles:
    """Returns the best schedule found on an H200, scaled to this device's number of SMs.

    If heads may be sparse or dense (`mixed`), a long head may be the only dense one. It is cut
    finer, but into fewer splits than blocks, because a team may take two splits slightly shorter
    than its share. Head dimensions other than 128 were tried but not tuned.
    """
    blocks = getattr(jax.local_devices()[0], "core_count", None) or 132  # 132: H100 and H200
    # 10 / 11 of 132 blocks are 120 splits: 48 us, against 56 with 132 (bench/README.md)
    splits = (*((10 * blocks // 11,) if mixed else ()), blocks // 2, blocks // 4, blocks // 8)
    if head_dim > 128:
        return Tiles(blocks, teams=1, splits=splits)
    return Tiles(blocks, stages=4 if head_dim <= 64 else 2, splits=splits)


def max_splits(max_tiles: int, t: Tiles) -> int:
    """Returns the number of splits of `max_tiles` tiles, an int; no shorter head has more."""
    few = min(-(-max_tiles // t.min_tiles), t.splits[-1])
    return max(1, next((split for split in t.splits[:-1] if max_tiles >= split * t.many), few))


def num_tiles(length, count, dense, page_size: int, t: Tiles):
    """Returns the number of tiles of heads with `length` tokens and `count` listed pages.

    Heads marked in `dense` read all their tokens; None: no head is dense.
    """
    tiles = _divided_up(count, TOKENS // page_size)
    if dense is not None:
        tiles = jnp.where(dense != 0, _divided_up(length, TOKENS), tiles)
    return jnp.where(length > 0, tiles, 0)


def num_splits(num_tiles, t: Tiles):
    """Returns the number of splits of heads with `num_tiles` tiles."""
    choice = jnp.minimum(_divided_up(num_tiles, t.min_tiles), t.splits[-1])
    for split in reversed(t.splits[:-1]):
        choice = jnp.where(num_tiles >= split * t.many, split, choice)
    return choice


def bounds(tiles, splits, nth):
    """Returns the first tile of the nth split and of the next one."""
    splits = jnp.maximum(splits, 1)
    return lax.div(nth * tiles, splits), lax.div((nth + 1) * tiles, splits)


def beginning(tiles, splits, before):
    """Returns the number of splits that start before the head's tile `before`, an arbitrary int."""
    tiles = jnp.maximum(tiles, 1)
    return jnp.maximum(lax.div(jnp.minimum(before, tiles) * splits + tiles - 1, tiles), 0)


def find(num_tiles, pairs: int, starts, sums):
    """Finds the heads that contain the tiles `starts`, and the number of tiles before each head.

    `num_tiles` is the vector of all heads, and `sums` sums each of several vectors. The index of a
    head is found bit by bit: on 256 heads of 64 to 16K tokens this took the kernel from 154 us,
    with a loop over all heads, to 130 (bench/README.md).
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
