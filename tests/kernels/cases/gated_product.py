"""Cases of `gated_product`: those of `skinny_product`, with gates."""

from dataclasses import replace

import jax.numpy as jnp

from tests.kernels.cases.skinny_product import CASES as PRODUCTS
from tests.kernels.cases.skinny_product import OTHERS, Case

CASES = tuple(replace(case, bias=False) for case in PRODUCTS if case.name != "bias")

__all__ = ["CASES", "OTHERS", "build"]


def build(case: Case, seed: int = 0) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Builds gate | up and the matrix; equal seeds give equal ones."""
    up, matrix, _ = case.build(seed)
    gate, *_ = case.build(seed + 1)
    return jnp.concatenate([gate, up], axis=-1), matrix
