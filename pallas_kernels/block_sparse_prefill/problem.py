# pyright: reportAbstractUsage=false
"""Static parameters of the Mosaic GPU kernel, and its memory."""

from functools import partial
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from jsparse.pallas_kernels.block_sparse_prefill.segments import BLOCK

HALVES, ROWS = 2, 64  # multiplying warpgroups, and each one's queries: the rows of a wgmma
WARPS = 4  # per warpgroup
PIECE = 32  # maximum tokens per copy: a quarter of a block, so that all warps copy equal parts
LANE = 64  # elements of a row of shared memory that are swizzled together


class Problem(NamedTuple):
    """Static parameters of one launch.

    Attributes:
        tokens: T, rounded up to whole blocks.
        pages: M.
        has_table: whether pages have a block table; otherwise a head's are adjacent.
        stages: blocks of K, and of V, in flight to shared memory.
        interpret: whether the interpreter runs the kernel, on any machine.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    has_table: bool
    stages: int
    dtype: Any
    interpret: bool

    @property
    def query_blocks(self) -> int:
        """QB."""
        return self.tokens // BLOCK

    @property
    def units(self) -> int:
        """The number of units of work, one per program."""
        return self.batch * self.heads * self.query_blocks

    @property
    def piece(self) -> int:
        """The number of tokens per copy."""
        return min(self.page_size, PIECE)

    @property
    def pieces(self) -> int:
        """The number of copies per block of K or V."""
        return BLOCK // self.piece


class GlobalRefs(NamedTuple):
    """Refs in global memory."""

    q: Any  # [B, T, N, H]
    k: Any  # [pieces, piece, H]
    v: Any  # [pieces, piece, H]
    units: Any  # [units, fields]: see `Unit`
    ids: Any  # [units, KB]
    table: Any  # [B · K, M]; None: the identity
    o: Any  # [B, T, N, H]

    @classmethod
    def of(cls, p: Problem, refs: tuple[Any, ...]) -> "GlobalRefs":
        """Names the launch's refs, which are in the order of the fields."""
        there = (name for name in cls._fields if p.has_table or name != "table")
        return cls(**dict.fromkeys(cls._fields) | dict(zip(there, refs, strict=True)))


class SharedRefs(NamedTuple):
    """Shared memory and barriers of a program.

    The copying warpgroup fills slots and the multiplying ones free them. A slot's nth use is its
    barriers' nth phase.
    """

    q_s: Any  # [halves, rows, H]; at the end o
    k_s: Any  # [stages, block, H]
    v_s: Any  # like k_s
    q_full: Any  # the queries have arrived
    k_full: Any  # [stages]: a block of K has arrived
    v_full: Any  # [stages]: a block of V has arrived
    k_free: Any  # [stages]: both warpgroups have read K
    v_free: Any  # [stages]: both warpgroups have read V
    turn: Any  # [halves]: the other warpgroup has issued its products: this one's turn


def shared_types(p: Problem) -> dict[str, Any]:
    """Returns the types of the fields of `SharedRefs`, by name."""
    swizzled = plgpu.TilingTransform((8, LANE)), plgpu.SwizzleTransform(2 * LANE)
    blocks = plgpu.SMEM((p.stages, BLOCK, p.head_dim), p.dtype, transforms=swizzled)
    ring = partial(plgpu.Barrier, num_barriers=p.stages)
    full, free = ring(num_arrivals=p.pieces), ring(num_arrivals=HALVES)
    return {
        "q_s": plgpu.SMEM((HALVES, ROWS, p.head_dim), p.dtype, transforms=swizzled),
        "k_s": blocks,
        "v_s": blocks,
        "q_full": plgpu.Barrier(num_arrivals=HALVES),
        "k_full": full,
        "v_full": full,
        "k_free": free,
        "v_free": free,
        "turn": plgpu.Barrier(num_barriers=HALVES),
    }
