"""What is static of one call of the Mosaic GPU kernel, and what its parts share."""

from typing import NamedTuple

import jax.numpy as jnp

from jsparse.pallas_kernels.block_sparse_decode.schedule import Tiles

M = 64  # rows of a wgmma; a group's queries are padded to it
WARPS, THREADS = 4, 128  # of a warpgroup
FIRST_ROW = 7  # of what a run is told by: which row of the window is the head's first
WORD = 32  # tokens, at most, whose bits one word holds
# floats of shared memory, at least, for a page's bias: copies begin at multiples of 128 bytes
BIAS_ROW = 32


class Problem(NamedTuple):
    """What is static of one call.

    Attributes:
        pairs: B·K.
        capacity: C.
        logits: whether the mean query's logits are wanted.
        interpret: run by the interpreter, on any machine.
    """

    pairs: int
    group: int
    head_dim: int
    page_size: int
    num_pages: int
    capacity: int
    has_bits: bool
    has_dense: bool
    has_table: bool
    has_bias: bool
    logits: bool
    dtype: jnp.dtype
    scale: float
    tiles: Tiles
    interpret: bool

    @property
    def padded_pairs(self) -> int:
        """Rounded up to whole vectors of a warpgroup."""
        return -(-self.pairs // THREADS) * THREADS

    @property
    def queries(self) -> int:
        """The group's, and their mean where its logits are wanted."""
        return self.group + self.logits

    @property
    def rows(self) -> int:
        """The queries, rounded up to whole tiles of shared memory."""
        return -(-self.queries // 8) * 8

    @property
    def heads_a_window(self) -> int:
        """Heads whose queries fill the rows together, and are copied together; else each is padded."""
        fit = 8 % self.queries == 0 and self.pairs * self.queries % 8 == 0
        return 8 // self.queries if fit else 1

    @property
    def pages_a_tile(self) -> int:
        return self.tiles.tokens // self.page_size

    @property
    def runs(self) -> int:
        """Runs that a team is told of at once; with many query heads there is room for the queries
        of one.
        """
        return 2 if self.rows <= 8 else 1

    @property
    def max_tiles(self) -> int:
        """The most tiles that a head can have; one more than listed, where the newest page is not."""
        listed = -(-(self.capacity + 1) // self.pages_a_tile) if self.capacity else 0
        dense = -(-self.num_pages // self.pages_a_tile) if self.has_dense else 0
        return max(listed, dense)
