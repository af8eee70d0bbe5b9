"""Loads queries in Triton, individually or as the mean of a group."""

import triton
import triton.language as tl


@triton.jit
def load_queries(at, inside, H: tl.constexpr, MEAN: tl.constexpr):
    """Loads queries, or the means of MEAN consecutive ones, rounded to their dtype.

    `at` points to channels of the first query of each; consecutive queries are H channels apart.
    """
    first = tl.load(at, mask=inside, other=0.0)
    if MEAN > 1:
        total = first.to(tl.float32)
        for nth in tl.static_range(1, MEAN):
            total += tl.load(at + nth * H, mask=inside, other=0.0).to(tl.float32)
        first = (total * (1.0 / MEAN)).to(first.dtype)
    return first
