"""Builds the inputs that tests share: named cases, each from a seed."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """Describes the shapes of one call, and how large numbers are; delta may be in parts."""

    name: str
    rows: int = 3
    width: int = 96
    size: float = 1.0
    eps: float = 1e-5
    dtype: str = "float32"
    parts: int | None = None

    def build(self, seed: int = 0) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
        """Builds x, delta and scale; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
        x, delta = self.size * rng.normal(size=(2, self.rows, self.width))
        scale = 1 + 0.3 * rng.normal(size=self.width)
        x, delta, scale = (jnp.asarray(each, self.dtype) for each in (x, delta, scale))
        if self.parts is not None:
            delta = jnp.asarray(self.size * rng.normal(size=(self.parts, *x.shape)), jnp.float32)
        return x, delta, scale


CASES = (
    Case("few"),
    Case("one_row", rows=1, width=576, dtype="bfloat16"),
    Case("wide", rows=2, width=4096, dtype="bfloat16"),
    Case("odd_width", width=101),
    Case("loud", size=1e3, dtype="bfloat16"),
    Case("quiet", size=1e-4, eps=1e-6),
    Case("half", rows=17, dtype="float16"),
    Case("parts", rows=4, width=4096, dtype="bfloat16", parts=8),
    Case("one_part", rows=2, width=101, dtype="bfloat16", parts=1),
)
