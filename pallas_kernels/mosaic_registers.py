# pyright: reportCallIssue=false, reportPrivateImportUsage=false
"""Maps a thread's registers to elements of a product in Mosaic GPU, with index arithmetic.

In the wgmma layout, a thread of warp w and lane l has rows 16 w + l / 4 and 8 below it of a
product's 64 rows, and of every 8 columns the two from 2 (l mod 4) on.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

THREADS = 128  # per warpgroup


def position() -> tuple[Any, Any]:
    """Returns this thread's first row and column."""
    warp, lane = divided(remainder(mgpu.thread_idx(), THREADS), 32)
    row, pair = divided(lane, 4)
    return arith.addi(row, times(warp, 16)), times(pair, 2)


def constant(like: Any, n: float) -> Any:
    """Returns a number of the same type."""
    return arith.constant(like.type, n)


def plus(x: Any, n: int) -> Any:
    """Returns x + n."""
    return arith.addi(x, constant(x, n))


def times(x: Any, n: int) -> Any:
    """Returns x · n."""
    return arith.muli(x, constant(x, n))


def remainder(x: Any, n: int) -> Any:
    """Returns x mod n."""
    return arith.remui(x, constant(x, n))


def divided(x: Any, n: int) -> tuple[Any, Any]:
    """Returns x / n, rounded down, and x mod n."""
    return arith.divui(x, constant(x, n)), remainder(x, n)


def below(x: Any, n: int) -> Any:
    """Returns whether 0 ≤ x < n: negative numbers are large in the unsigned comparison."""
    return arith.cmpi(arith.CmpIPredicate.ult, x, constant(x, n))


def index(x: Any) -> Any:
    """Returns a number as an index of memory."""
    return arith.index_cast(ir.IndexType.get(), x)
