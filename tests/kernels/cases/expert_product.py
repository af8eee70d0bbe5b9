"""Cases of `expert_product`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from tests.kernels.cases.named import Named, put


@dataclass(frozen=True)
class Case(Named):
    """A call of `expert_product`.

    Attributes:
        rows, k: the numbers of rows, and of experts of each.
        experts: the number of experts; if `absent`, chosen ones may be beyond it.
        width, out: the sizes of the matrices.
        each: whether x has a row for each expert of a row.
        weighted: whether products have factors.
        alike: whether all rows have the same experts.
    """

    rows: int = 1
    k: int = 4
    experts: int = 12
    width: int = 96
    out: int = 80
    gated: bool = False
    each: bool = False
    weighted: bool = False
    absent: bool = False
    alike: bool = False
    dtype: str = "bfloat16"

    def inputs(self, rng: np.random.Generator) -> tuple[Array, Array, Array, Array | None]:
        """Draws x, the matrices, the chosen experts and the weights."""
        shape = (self.k, self.rows, self.width) if self.each else (self.rows, self.width)
        matrices = rng.normal(size=(self.experts, self.width, self.out)) / self.width**0.5
        known = self.experts * 2 if self.absent else self.experts
        drawn = [rng.permutation(known)[: self.k] for _ in range(self.rows)]
        chosen = np.array(drawn[:1] * self.rows if self.alike else drawn).reshape(-1, self.k).T
        weights = put(rng.random(chosen.shape), "float32") if self.weighted else None
        x = put(rng.normal(size=shape), self.dtype)
        return x, put(matrices, self.dtype), put(chosen, "int32"), weights


CASES = (
    Case("one_row", gated=True),
    Case("down", each=True, weighted=True),
    Case("few_rows", rows=5, gated=True, width=100, out=72),
    Case("few_down", rows=5, each=True, weighted=True, width=40, out=50),
    Case("same_experts", rows=21, k=2, gated=True, alike=True),
    Case("absent", rows=6, each=True, weighted=True, absent=True),
    Case("few_absent", rows=2, gated=True, absent=True),
    Case("parts_of_pairs", rows=50, k=3, experts=7, each=True, weighted=True, width=40, out=50),
    Case("one_expert", rows=2, k=1, experts=1, dtype="float16"),
    Case("many_rows", rows=150, gated=True, width=72, out=96),
    Case("many_down", rows=150, each=True, weighted=True, absent=True, out=160),
    Case("many_alike", rows=270, k=2, alike=True, experts=3),
)
OTHERS = (
    Case("no_rows", rows=0),
    Case("float32", rows=30, gated=True, dtype="float32"),
)
