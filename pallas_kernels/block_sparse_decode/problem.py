"""Static parameters of the Mosaic GPU kernel, and constants that its parts share."""

from typing import NamedTuple

import jax.numpy as jnp

from jsparse.pallas_kernels.block_sparse_decode.schedule import TOKENS, Tiles

LANE = 64  # elements of a row of shared memory that are swizzled together
WARPS, THREADS = 4, 128  # per warpgroup
FIRST_ROW = 7  # entry of a run's description: the head's first row in its window
WORD = 32  # maximum number of tokens per word of bits
BIAS_ROW = 32  # minimum floats of a page's bias: copies start at multiples of 128 bytes


class Problem(NamedTuple):
    """Static parameters of one launch.

    Attributes:
        pairs: B·K.
        capacity: C.
        logits: whether the mean query's logits are requested.
        interpret: whether the interpreter runs the kernel, on any machine.
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
        """`pairs`, rounded up to whole vectors of a warpgroup."""
        return -(-self.pairs // THREADS) * THREADS

    @property
    def queries(self) -> int:
        """The number of queries: the group's, plus their mean if its logits are requested."""
        return self.group + self.logits

    @property
    def columns(self) -> int:
        """The number of queries, rounded up to a multiple of 8 for wgmma and shared memory."""
        return -(-self.queries // 8) * 8

    @property
    def heads_a_window(self) -> int:
        """The number of heads that share 8 columns and one copy of queries; 1: padding."""
        fit = 8 % self.queries == 0 and self.pairs * self.queries % 8 == 0
        return 8 // self.queries if fit else 1

    @property
    def pages_a_tile(self) -> int:
        """The number of pages per tile."""
        return TOKENS // self.page_size

    @property
    def runs(self) -> int:
        """The number of a team's runs in shared memory at once.

        With many query heads, only one run's queries fit.
        """
        return 2 if self.columns <= 8 else 1

    @property
    def max_tiles(self) -> int:
        """The maximum number of tiles of a head, including the newest page after a full list."""
        listed = -(-(self.capacity + 1) // self.pages_a_tile) if self.capacity else 0
        dense = -(-self.num_pages // self.pages_a_tile) if self.has_dense else 0
        return max(listed, dense)
