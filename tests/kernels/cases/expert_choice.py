"""Cases of `expert_choice`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from tests.kernels.cases.named import Named, put


@dataclass(frozen=True)
class Case(Named):
    """A call of `expert_choice`; `steps` > 0: logits are multiples of 1 / steps, many equal."""

    rows: int = 3
    experts: int = 12
    k: int = 4
    size: float = 1.0
    steps: int = 0
    normalized: bool = True

    def inputs(self, rng: np.random.Generator) -> tuple[Array]:
        """Draws the logits."""
        logits = self.size * rng.normal(size=(self.rows, self.experts))
        if self.steps:
            logits = np.round(logits * self.steps) / self.steps
        return (put(logits, "float32"),)


CASES = (
    Case("few"),
    Case("shares", normalized=False),
    Case("qwen3", rows=1, experts=128, k=8),
    Case("equal", rows=9, experts=60, steps=1),
    Case("all", experts=5, k=5),
    Case("loud", experts=33, size=1e4),
)
