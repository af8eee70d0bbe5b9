"""Shares out the work of `mosaic_many` among the programs of its launch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import jax.numpy as jnp

from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS

WARPGROUPS = 2  # that multiply
TILE = ROWS * WARPGROUPS  # rows of the matrix that a program has at a time: 64 of each
CHUNK = 64  # columns
ROW_TILES, PARTS = (64, 128, 256), (2, 4, 8)
MULTICAST = 256  # row tiles from this size on are multicast to a cluster of two programs
UNIT_CHUNKS = 4  # what a unit costs beside its chunks, in chunks
LAUNCH_CHUNKS = 3  # what the launch costs that adds parts up
SUMS_A_CHUNK = 2**18  # sums of parts that are written and read again in the time of a chunk


@dataclass(frozen=True)
class Problem:
    """Holds the sizes of one launch; it is the key of compiled kernels.

    Attributes:
        rows: of x, a multiple of 8.
        out, width: the sizes of the matrix.
        row_tile: the rows of x in a unit.
        cluster: the programs that share rows of x, 1 or 2; a tile of the matrix is theirs together.
        stages: the chunks that shared memory holds.
        blocks: the most programs.
        dtype: of products of whole tiles, bfloat16 or float32.
        interpret: whether it runs in the interpreter.
        whole: the first tiles, which are multiplied in one piece.
        parts: the parts that columns of the other tiles are cut into.
    """

    rows: int
    out: int
    width: int
    row_tile: int
    cluster: int
    stages: int
    blocks: int
    dtype: jnp.dtype
    interpret: bool
    whole: int = 0
    parts: int = 1

    @property
    def row_tiles(self) -> int:
        """Returns the number of tiles of x."""
        return -(-self.rows // self.row_tile)

    @property
    def tiles(self) -> int:
        """Returns the number of tiles of the matrix."""
        return -(-self.out // (TILE * self.cluster))

    @property
    def rest(self) -> int:
        """Returns the number of tiles that are multiplied in parts."""
        return self.tiles - self.whole

    @property
    def first_of_rest(self) -> int:
        """Returns the first row of the matrix that is multiplied in parts."""
        return self.whole * TILE * self.cluster

    @property
    def whole_units(self) -> int:
        """Returns the number of units in one piece, which are the first."""
        return self.whole * self.row_tiles

    @property
    def units(self) -> int:
        """Returns the number of all units, of which a cluster has one at a time."""
        return self.whole_units + self.rest * self.parts * self.row_tiles

    @property
    def clusters(self) -> int:
        """Returns the number of clusters, which take units in turn."""
        return min(self.blocks // self.cluster, self.units)

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of a unit in one piece."""
        return -(-self.width // CHUNK)

    @property
    def part_chunks(self) -> int:
        """Returns the number of chunks of a part."""
        return -(-self.width // (CHUNK * self.parts))

    @property
    def cost(self) -> int:
        """Estimates the time of the first cluster, which has most to do, in chunks."""
        pieces, units = (-(-n // self.clusters) for n in (self.whole_units, self.units))
        cost = pieces * (self.chunks + UNIT_CHUNKS)
        cost += (units - pieces) * (self.part_chunks + UNIT_CHUNKS)
        if self.rest:
            sums = self.parts * self.rows * (self.out - self.first_of_rest)
            cost += LAUNCH_CHUNKS + sums // SUMS_A_CHUNK
        return cost


@cache
def best_split(problem: Problem) -> Problem:
    """Returns the problem with the split of least cost.

    Where a last round has units for a few clusters only, parts give more of them something to do,
    but XLA adds their sums up.
    """

    def splits() -> Iterator[Problem]:
        yield replace(problem, whole=problem.tiles, parts=1)
        for whole in reversed(range(problem.tiles)):
            for parts in PARTS:
                if parts <= problem.chunks:
                    yield replace(problem, whole=whole, parts=parts)

    return min(splits(), key=lambda split: split.cost)
