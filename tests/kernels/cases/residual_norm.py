"""Cases of `residual_norm`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from tests.kernels.cases.named import Named, put


@dataclass(frozen=True)
class Case(Named):
    """A call of `residual_norm`; `size` is the magnitude of numbers, and delta may be in parts."""

    rows: int = 3
    width: int = 96
    size: float = 1.0
    eps: float = 1e-5
    dtype: str = "float32"
    parts: int | None = None

    def inputs(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Draws x, delta and scale."""
        x, delta = self.size * rng.normal(size=(2, self.rows, self.width))
        scale = 1 + 0.3 * rng.normal(size=self.width)
        if self.parts is not None:
            delta = self.size * rng.normal(size=(self.parts, *x.shape))
        delta = put(delta, self.dtype if self.parts is None else np.float32)
        return put(x, self.dtype), delta, put(scale, self.dtype)


CASES = (
    Case("few"),
    Case("one_row", rows=1, width=576, dtype="bfloat16"),
    Case("odd_width", width=101),
    Case("loud", size=1e3, dtype="bfloat16"),
    Case("half", rows=17, dtype="float16"),
    Case("parts", rows=4, width=4096, dtype="bfloat16", parts=8),
    Case("one_part", rows=2, width=101, dtype="bfloat16", parts=1),
)
