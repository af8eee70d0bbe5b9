"""Sizes above which methods were measured to be faster than dense attention, by device."""

from typing import NamedTuple

import jax


class BreakEvens(NamedTuple):
    """Bytes of one layer's K and V over all rows (bench/results/twilight_speed).

    Attributes:
        over_quest: the size at which dense attention takes as long as Twilight over a Quest of a
            quarter of the context, in one row and in 8. With 8 KV heads, 128 channels and 16 bits
            this is 36,600 tokens on an H100, and 58,600 on an H200.
        over_all_pages: the size above which Twilight over all pages, the choice of `auto`, was
            faster in batches of 1 to 64.
        drafting: the size of the measured case in which drafting with `verified` was faster
            (docs/exact.md); None: not measured.
    """

    over_quest: float
    over_all_pages: float
    drafting: float | None


BREAK_EVENS = {
    "NVIDIA H100 80GB HBM3": BreakEvens(150e6, 165e6, 375e6),
    "NVIDIA H200": BreakEvens(240e6, 400e6, None),
}


def break_evens() -> BreakEvens | None:
    """Returns the sizes for the default device; None if they were not measured."""
    return BREAK_EVENS.get(jax.local_devices()[0].device_kind)
