"""Builds the inputs that tests share: named cases, each from a seed."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """Describes the sizes of one call.

    Attributes:
        batch: the axes of x but for its last.
        width, out: the sizes of the matrix.
        size: how large numbers of x are.
        bias: whether one is added.
    """

    name: str
    batch: tuple[int, ...] = (1, 1)
    width: int = 256
    out: int = 192
    size: float = 1.0
    bias: bool = False
    dtype: str = "bfloat16"

    def build(self, seed: int = 0) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray | None]:
        """Builds x, the matrix and the bias; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
        x = self.size * rng.normal(size=(*self.batch, self.width))
        matrix = rng.normal(size=(self.width, self.out)) / self.width**0.5
        bias = jnp.asarray(rng.normal(size=self.out), self.dtype) if self.bias else None
        return jnp.asarray(x, self.dtype), jnp.asarray(matrix, self.dtype), bias


# one row of two bytes a number
CASES = (
    Case("one_row"),
    Case("bias", width=640, bias=True),
    Case("rows_left_over", width=576, out=960),
    Case("odd_sizes", width=101, out=37, bias=True),
    Case("narrow", width=1536, out=8),
    Case("loud", size=1e4),
    Case("quiet", size=1e-3),
    Case("half", dtype="float16", batch=(1,)),
)
OTHERS = (
    Case("many_rows", batch=(3, 5), bias=True),
    Case("no_rows", batch=(0,)),
    Case("float32", dtype="float32"),
)
