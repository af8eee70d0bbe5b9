"""Defines the static parameters of the Mosaic GPU kernel and the constants that its parts share."""

from typing import NamedTuple

import jax.numpy as jnp

from jsparse.pallas_kernels.block_sparse_decode.schedule import TOKENS, Tiles

LANE = 64  # numbers of a row of shared memory that are swizzled together
WARPS, THREADS = 4, 128  # of a warpgroup
FIRST_ROW = 7  # index in a run's description of the window's row that is the head's first
WORD = 32  # most tokens whose bits one word holds
BIAS_ROW = 32  # least floats of a page's bias: copies begin at multiples of 128 bytes


class Problem(NamedTuple):
    """Holds the static parameters of one launch.

    Attributes:
        pairs: B·K.
        capacity: C.
        logits: whether the mean query's logits are wanted.
        interpret: whether the interpreter runs it, on any machine.
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
        """Returns `pairs`, rounded up to whole vectors of a warpgroup."""
        return -(-self.pairs // THREADS) * THREADS

    @property
    def queries(self) -> int:
        """Returns the number of queries: the group's, and their mean if its logits are wanted."""
        return self.group + self.logits

    @property
    def columns(self) -> int:
        """Returns the number of queries, rounded up to what products and shared memory have."""
        return -(-self.queries // 8) * 8

    @property
    def heads_a_window(self) -> int:
        """Returns how many heads' queries fill 8 columns and are copied at once; 1: padding."""
        fit = 8 % self.queries == 0 and self.pairs * self.queries % 8 == 0
        return 8 // self.queries if fit else 1

    @property
    def pages_a_tile(self) -> int:
        """Returns the number of pages per tile."""
        return TOKENS // self.page_size

    @property
    def runs(self) -> int:
        """Returns how many runs of a team are in shared memory at once.

        With many query heads there is room for the queries of one.
        """
        return 2 if self.columns <= 8 else 1

    @property
    def max_tiles(self) -> int:
        """Returns the most tiles that a head can have, with the newest page beyond a full list."""
        listed = -(-(self.capacity + 1) // self.pages_a_tile) if self.capacity else 0
        dense = -(-self.num_pages // self.pages_a_tile) if self.has_dense else 0
        return max(listed, dense)
