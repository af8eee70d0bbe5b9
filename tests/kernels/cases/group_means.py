"""Cases of `group_means`.

Points past a row's number and their groups are `JUNK`, so that reading them is detected.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.kernels.cases.named import Named, put

JUNK = 10**9
Inputs = namedtuple("Inputs", "points of_point number groups")


@dataclass(frozen=True)
class Case(Named):
    """A call of `group_means`.

    Attributes:
        points: C.
        max_groups: L.
        used: points and groups per row: "any" number, including all and, for points, none; "all";
            or "three_quarters" of them.
        like: "whole", small numbers whose sums are exact; "normal" ones; "spread" ones, of very
            different sizes.
    """

    batch: int = 3
    kv_heads: int = 2
    points: int = 200
    max_groups: int = 100
    head_dim: int = 32
    dtype: str = "bfloat16"
    used: Literal["any", "all", "three_quarters"] = "any"
    like: Literal["whole", "normal", "spread"] = "whole"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        number = self._used(rng, self.points, 0)
        groups = self._used(rng, self.max_groups, 1)
        shape = (self.batch, self.kv_heads, self.points, self.head_dim)
        if self.like == "whole":
            points = rng.integers(-8, 9, shape).astype(np.float32)
        else:
            points = rng.standard_normal(shape, np.float32)
        if self.like == "spread":
            points *= 10.0 ** rng.integers(-3, 4, (*shape[:3], 1))
        of_point = rng.integers(0, groups[:, None, None], shape[:3])
        past = np.broadcast_to(np.arange(self.points) >= number[:, None, None], shape[:3])
        points[past], of_point[past] = JUNK, JUNK
        return Inputs(
            put(points, self.dtype), *(put(x, np.int32) for x in (of_point, number, groups))
        )

    def _used(self, rng: np.random.Generator, maximum: int, minimum: int) -> np.ndarray:
        if self.used == "any":
            used = rng.integers(minimum, maximum + 1, self.batch)
            used[:2] = (maximum, minimum)[: self.batch]
            return rng.permutation(used)
        return np.full(
            self.batch, maximum if self.used == "all" else max(maximum * 3 // 4, minimum)
        )


CASES = (
    Case("any"),
    Case("float32", dtype="float32"),
    Case("spread", dtype="float32", like="spread"),
    Case("one_point", batch=1, kv_heads=1, points=1, max_groups=3, used="all"),
    Case("few_groups", points=900, max_groups=5),
    Case("odd", points=333, max_groups=257, head_dim=40),
    Case("wide", points=130, max_groups=70, head_dim=256),
    Case("normal", points=300, max_groups=150, head_dim=128, like="normal"),
)
