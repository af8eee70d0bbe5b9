"""Shares out the work of `mosaic_many` among the programs of its launch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp

from jsparse.pallas_kernels.quantized_product.mosaic_shared import BLOCKS_OF_H100, ROWS

WARPGROUPS = 2  # that multiply
TILE = ROWS * WARPGROUPS  # rows of the matrix that a program has at a time: 64 of each
CHUNK = 64  # columns
TILES, PARTS = (64, 128, 256), (2, 4, 8)
PAIRED = 256  # rows of x in a unit from which on two programs share them
# what a unit costs beside its chunks, and adding up sums of parts, in chunks
UNIT_CHUNKS, LAUNCH_CHUNKS = 4, 3
SUMS_A_CHUNK = 2**18  # sums of parts that are written and read again in the time of a chunk


@dataclass(frozen=True)
class Problem:
    """Holds the sizes of one launch; it is the key of compiled kernels.

    Attributes:
        rows: of x, a multiple of 8.
        out, width: the sizes of the matrix.
        tile: the rows of x in a unit.
        whole: the first tiles of the matrix, which are multiplied in one piece.
        parts: the parts that columns of the other tiles are cut into.
        stages: the chunks that shared memory holds.
        blocks: the most programs.
        cluster: the programs that share rows of x, 1 or 2; a tile is theirs together.
        dtype: of products of whole tiles, bfloat16 or float32.
        interpret: whether it runs in the interpreter.
    """

    rows: int
    out: int
    width: int
    tile: int
    whole: int
    parts: int
    stages: int
    blocks: int
    cluster: int
    dtype: jnp.dtype
    interpret: bool

    @property
    def row_tiles(self) -> int:
        """Returns the tiles of x."""
        return -(-self.rows // self.tile)

    @property
    def rest(self) -> int:
        """Returns the number of tiles that are multiplied in parts."""
        return tiles_of(self.out, self.cluster) - self.whole

    @property
    def first_of_rest(self) -> int:
        """Returns the first row of the matrix that is multiplied in parts."""
        return min(self.whole * TILE * self.cluster, self.out)

    @property
    def whole_units(self) -> int:
        """Returns the number of units whose tiles are multiplied in one piece, the first ones."""
        return self.whole * self.row_tiles

    @property
    def units(self) -> int:
        """Returns the number of all units, of which a cluster has one at a time."""
        return self.whole_units + self.rest * self.parts * self.row_tiles

    @property
    def clusters(self) -> int:
        """Returns the number of clusters."""
        return min(self.blocks // self.cluster, self.units)

    @property
    def chunks(self) -> int:
        """Returns the chunks of a unit in one piece."""
        return -(-self.width // CHUNK)

    @property
    def part_chunks(self) -> int:
        """Returns the chunks of a part."""
        return -(-self.width // (CHUNK * self.parts))


def tiles_of(out: int, cluster: int) -> int:
    """Returns the number of tiles of a matrix."""
    return -(-out // (TILE * cluster))


@cache
def best_split(rows: int, out: int, width: int, tile: int, cluster: int) -> tuple[int, int]:
    """Returns how many tiles are multiplied in one piece, and the parts of the others.

    Programs take units in turn. With parts the last round keeps more of them busy, but XLA adds
    their sums up, which takes as long as some chunks do. The busiest program is to have least.
    """
    row_tiles, tiles = -(-rows // tile), tiles_of(out, cluster)
    programs = BLOCKS_OF_H100 // cluster
    chunks = -(-width // CHUNK) + UNIT_CHUNKS

    def splits() -> Iterator[tuple[int, int]]:
        yield tiles, 1
        for whole in reversed(range(tiles)):
            yield from ((whole, parts) for parts in PARTS)

    def cost(split: tuple[int, int]) -> int:
        whole, parts = split
        first = whole * row_tiles
        units = first + (tiles - whole) * parts * row_tiles
        part_chunks = -(-width // (CHUNK * parts)) + UNIT_CHUNKS

        def of(program: int) -> int:
            pieces, all_units = (-(-(end - program) // programs) for end in (first, units))
            return pieces * chunks + (all_units - pieces) * part_chunks

        busiest = max(map(of, {0, first % programs, units % programs, programs - 1}))
        if whole == tiles:
            return busiest
        sums = parts * rows * (out - whole * TILE * cluster)
        return busiest + LAUNCH_CHUNKS + sums // SUMS_A_CHUNK

    return min(splits(), key=cost)
