"""Cases of `skinny_product`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from tests.kernels.cases.named import Named, put


@dataclass(frozen=True)
class Case(Named):
    """A call of `skinny_product`.

    Attributes:
        batch: the axes of x except the last.
        width, out: the sizes of the matrix.
        size: the magnitude of x.
        bias: whether one is added.
    """

    batch: tuple[int, ...] = (1, 1)
    width: int = 256
    out: int = 192
    size: float = 1.0
    bias: bool = False
    dtype: str = "bfloat16"

    def inputs(self, rng: np.random.Generator) -> tuple[Array, Array, Array | None]:
        """Draws x, the matrix and the bias."""
        x = self.size * rng.normal(size=(*self.batch, self.width))
        matrix = rng.normal(size=(self.width, self.out)) / self.width**0.5
        bias = rng.normal(size=self.out) if self.bias else None
        return put(x, self.dtype), put(matrix, self.dtype), put(bias, self.dtype)


# one row of 2-byte numbers
CASES = (
    Case("one_row"),
    Case("bias", width=640, bias=True),
    Case("rows_left_over", width=576, out=960),
    Case("odd_sizes", width=101, out=37, bias=True),
    Case("narrow", width=1536, out=8),
    Case("loud", size=1e4),
    Case("half", dtype="float16", batch=(1,)),
)
OTHERS = (
    Case("many_rows", batch=(3, 5), bias=True),
    Case("no_rows", batch=(0,)),
    Case("float32", dtype="float32"),
)
