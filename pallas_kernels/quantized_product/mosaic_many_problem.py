"""Divides the work of `mosaic_many` among the programs of its launch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp

from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS
from jsparse.pallas_kernels.weight_blocks import Form, out_axis

WARPGROUPS = 2  # multiplying warpgroups
TILE = ROWS * WARPGROUPS  # rows of the matrix per program: 64 per warpgroup
CHUNK = 64  # columns
BOX = 16  # bytes by which the begin and the size of a row that TMA copies must be divisible
ROW_TILES, PARTS = (64, 128, 256), (2, 4, 8)
MULTICAST = 256  # minimum row tile that is multicast to a cluster of two programs
UNIT_CHUNKS = 4  # overhead of a unit, in chunks
LAUNCH_CHUNKS = 3  # cost of the launch that adds the parts
SUMS_A_CHUNK = 2**18  # partial sums written and read again in the time of one chunk


class Piece(NamedTuple):
    """A chunk's piece of one of the matrix's arrays.

    Attributes:
        shape: that of the piece, with TILE rows of the matrix on one of the axes.
        columns: columns of the matrix per element of the other axis.
    """

    shape: tuple[int, int]
    dtype: Any
    columns: int


@dataclass(frozen=True)
class Problem:
    """Sizes of one launch; the key of compiled kernels.

    Attributes:
        form: the format of the matrix.
        rows: rows of x, a multiple of 8.
        out, width: the sizes of the matrix.
        row_tile: rows of x per unit.
        cluster: programs that share rows of x, 1 or 2; a tile of the matrix spans them.
        stages: chunks in shared memory.
        blocks: maximum programs.
        dtype: the type of whole tiles' products, bfloat16 or float32.
        interpret: whether the kernel runs in the interpreter.
        whole: the number of leading tiles that are multiplied in one piece.
        parts: parts of the columns of the other tiles.
    """

    form: Form
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
    def pieces(self) -> dict[str, Piece]:
        """A chunk's piece of each array.

        It has a scale even if a group is longer than a chunk, and BOX bytes of the codes' fifth
        bits, which are those of two chunks.
        """
        made = {}
        for name, spec in self.form.arrays(TILE, self.width).items():
            axis, least = (1, BOX) if out_axis(name) == 0 else (0, 1)
            columns = self.width // spec.shape[axis]
            size = max(CHUNK // columns, least)
            made[name] = Piece((TILE, size) if axis else (size, TILE), spec.dtype, columns)
        return made

    @property
    def row_tiles(self) -> int:
        """The number of tiles of x."""
        return -(-self.rows // self.row_tile)

    @property
    def tiles(self) -> int:
        """The number of tiles of the matrix."""
        return -(-self.out // (TILE * self.cluster))

    @property
    def rest(self) -> int:
        """The number of tiles that are multiplied in parts."""
        return self.tiles - self.whole

    @property
    def first_of_rest(self) -> int:
        """The first row of the matrix that is multiplied in parts."""
        return self.whole * TILE * self.cluster

    @property
    def whole_units(self) -> int:
        """The number of units in one piece, which come first."""
        return self.whole * self.row_tiles

    @property
    def units(self) -> int:
        """The number of all units; a cluster has one at a time."""
        return self.whole_units + self.rest * self.parts * self.row_tiles

    @property
    def clusters(self) -> int:
        """The number of clusters, which take units in turn."""
        return min(self.blocks // self.cluster, self.units)

    @property
    def chunks(self) -> int:
        """The number of chunks of a unit in one piece."""
        return -(-self.width // CHUNK)

    @property
    def part_chunks(self) -> int:
        """The number of chunks of a part."""
        return -(-self.width // (CHUNK * self.parts))

    @property
    def cost(self) -> int:
        """The estimated time, in chunks, of the first cluster, which has the most work."""
        pieces, units = (-(-n // self.clusters) for n in (self.whole_units, self.units))
        cost = pieces * (self.chunks + UNIT_CHUNKS)
        cost += (units - pieces) * (self.part_chunks + UNIT_CHUNKS)
        if self.rest:
            sums = self.parts * self.rows * (self.out - self.first_of_rest)
            cost += LAUNCH_CHUNKS + sums // SUMS_A_CHUNK
        return cost


@cache
def best_split(problem: Problem) -> Problem:
    """Returns the problem with the cheapest split.

    If the last wave has units for only a few clusters, splitting into parts gives more of them
    work, but XLA has to add the parts.
    """

    def splits() -> Iterator[Problem]:
        yield replace(problem, whole=problem.tiles, parts=1)
        for whole in reversed(range(problem.tiles)):
            for parts in PARTS:
                if parts <= problem.chunks:
                    yield replace(problem, whole=whole, parts=parts)

    return min(splits(), key=lambda split: split.cost)
