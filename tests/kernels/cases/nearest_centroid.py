"""Cases of `nearest_centroid`.

Points past a row's number and centroids past its groups are `JUNK`, so that reading them is
detected.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from tests.kernels.cases.named import Named, put

JUNK = 1e30
Inputs = namedtuple("Inputs", "points centroid number groups")


@dataclass(frozen=True)
class Case(Named):
    """A call of `nearest_centroid`.

    Attributes:
        points: C.
        groups: L.
        used: points and groups per row: "any" number, including all and none; "all"; or
            "three_quarters" of them.
        like: "whole", small numbers whose products are exact and often equal; "directions", vectors
            of length 1.
    """

    batch: int = 3
    kv_heads: int = 2
    points: int = 200
    groups: int = 100
    head_dim: int = 32
    dtype: str = "bfloat16"
    used: Literal["any", "all", "three_quarters"] = "any"
    like: Literal["whole", "directions"] = "whole"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        number, groups = self._used(rng, self.points), self._used(rng, self.groups)
        points = self._vectors(rng, self.points, number)
        centroid = self._vectors(rng, self.groups, groups)
        return Inputs(points, centroid, put(number, np.int32), put(groups, np.int32))

    def _used(self, rng: np.random.Generator, maximum: int) -> np.ndarray:
        if self.used == "any":
            used = rng.integers(0, maximum + 1, self.batch)
            used[:2] = (maximum, 0)[: self.batch]
            return rng.permutation(used)
        return np.full(self.batch, maximum if self.used == "all" else maximum * 3 // 4)

    def _vectors(self, rng: np.random.Generator, maximum: int, used: np.ndarray) -> jnp.ndarray:
        shape = (self.batch, self.kv_heads, maximum, self.head_dim)
        if self.like == "whole":
            x = rng.integers(-1, 2, shape).astype(np.float32)
        else:
            x = rng.standard_normal(shape, np.float32)
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
        x[np.broadcast_to(np.arange(maximum) >= used[:, None, None], shape[:3])] = JUNK
        return put(x, self.dtype)


CASES = (
    Case("any"),
    Case("float32", dtype="float32"),
    Case("few_points", points=23, groups=1000),
    Case("one_point", batch=1, kv_heads=1, points=1, groups=600, used="all"),
    Case("one_group", groups=1, used="all"),
    Case("odd", points=333, groups=257, head_dim=40),
    Case("wide", points=130, groups=70, head_dim=256),
    Case("directions", points=300, groups=150, head_dim=128, like="directions"),
)
