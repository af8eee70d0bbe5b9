"""Cases of `new_token_attention`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from tests.kernels.cases.named import Named, put


@dataclass(frozen=True)
class Case(Named):
    """A call of `new_token_attention`; the last row of the batch has no earlier tokens."""

    batch: int = 2
    tokens: int = 5
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    dtype: str = "float32"

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        """Draws q, k, v, and the partial over earlier tokens."""
        new, heads = (self.batch, self.tokens), (self.kv_heads * self.group, self.kv_heads)
        q, k, v = (
            put(rng.normal(size=(*new, number, self.head_dim)), self.dtype)
            for number in (heads[0], heads[1], heads[1])
        )
        rows = self.batch, self.kv_heads, self.tokens * self.group
        o, lse = rng.normal(size=(*rows, self.head_dim)), 2 * rng.normal(size=rows)
        o[-1], lse[-1] = 0, -np.inf
        return q, k, v, put(o, "float32"), put(lse, "float32")


CASES = (
    Case("few"),
    Case("one_token", batch=3, tokens=1, kv_heads=1, group=1, head_dim=16),
    Case("qwen", batch=4, kv_heads=2, group=6, head_dim=128, dtype="bfloat16"),
    Case("many_queries", tokens=17, group=5, head_dim=128, dtype="float16"),
    Case("odd_width", tokens=3, head_dim=40, dtype="bfloat16"),
)
