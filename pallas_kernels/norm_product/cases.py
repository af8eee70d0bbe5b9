"""Builds the inputs that tests share: those of `skinny_product`, with a residual and a norm."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jsparse.pallas_kernels.skinny_product.cases import CASES as ROWS
from jsparse.pallas_kernels.skinny_product.cases import OTHERS, Case

EPS = 1e-5


@dataclass(frozen=True)
class DeltaInParts(Case):
    """Describes the sizes of a call whose delta is in parts."""

    parts: int = 3


CASES = (*ROWS, DeltaInParts("delta_in_parts"))

__all__ = ["CASES", "EPS", "OTHERS", "build"]


def build(
    case: Case, seed: int = 0
) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray, jnp.ndarray, jnp.ndarray | None]:
    """Builds x, delta, scale, the matrix and the bias; equal seeds give equal ones."""
    x, matrix, bias = case.build(seed)
    rng = np.random.default_rng(seed + 1)
    if isinstance(case, DeltaInParts):
        delta = jnp.asarray(rng.normal(size=(case.parts, *x.shape)), jnp.float32)
    else:
        delta = jnp.asarray(case.size * rng.normal(size=x.shape), case.dtype)
    scale = jnp.asarray(1 + 0.3 * rng.normal(size=case.width), case.dtype)
    return x, delta, scale, matrix, bias
