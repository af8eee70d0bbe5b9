"""Cases of `norm_product`: those of `skinny_product`, with a residual and a norm."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from tests.kernels.cases.named import put
from tests.kernels.cases.skinny_product import CASES as ROWS
from tests.kernels.cases.skinny_product import OTHERS, Case

EPS = 1e-5


@dataclass(frozen=True)
class DeltaInParts(Case):
    """A call with delta in parts."""

    parts: int = 3


CASES = (*ROWS, DeltaInParts("delta_in_parts"))

__all__ = ["CASES", "EPS", "OTHERS", "build"]


def build(case: Case, seed: int = 0) -> tuple[Array, Array, Array, Array, Array | None]:
    """Builds x, delta, scale, the matrix and the bias; equal seeds give equal ones."""
    x, matrix, bias = case.build(seed)
    rng = np.random.default_rng(seed + 1)
    if isinstance(case, DeltaInParts):
        delta = put(rng.normal(size=(case.parts, *x.shape)), np.float32)
    else:
        delta = put(case.size * rng.normal(size=x.shape), case.dtype)
    scale = put(1 + 0.3 * rng.normal(size=case.width), case.dtype)
    return x, delta, scale, matrix, bias
