"""Cases of `centroid_scores`.

Centroids and radii past a head's number, or in no chosen unit, are `JUNK`, so that reading them is
detected.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.kernels.cases.named import Named, put

JUNK = np.nan
Inputs = namedtuple("Inputs", "q centroids number radius unit chosen")


@dataclass(frozen=True)
class Case(Named):
    """A call of `centroid_scores`.

    Attributes:
        group: G.
        clusters: L.
        number: centroids per head: "any" number, including L and 0; "all" L; or this number.
        radii: whether centroids have radii.
        units: U; 0: no units. A quarter of a head's units are chosen, none of the second head's.
        dtype: type of queries and centroids.
    """

    batch: int = 2
    kv_heads: int = 3
    group: int = 4
    clusters: int = 40
    head_dim: int = 64
    number: Literal["any", "all"] | int = "any"
    radii: bool = False
    units: int = 0
    dtype: str = "float32"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads = (self.batch, self.kv_heads)
        number = np.full(heads, self.clusters if self.number == "all" else self.number)
        if self.number == "any":
            number = rng.integers(0, self.clusters + 1, heads)
            number.flat[:2] = (self.clusters, 0)[: number.size]
        q = rng.normal(size=(self.batch, self.kv_heads * self.group, self.head_dim))
        centroids = rng.normal(size=(*heads, self.clusters, self.head_dim))
        past = np.arange(self.clusters) >= number[..., None]
        unit = chosen = None
        if self.units:
            # units of very different sizes
            unit = (self.units * rng.random(past.shape) ** 2).astype(np.int32)
            chosen = rng.random((*heads, self.units)) < 0.25
            chosen.reshape(-1, self.units)[1:2] = False
            past |= ~np.take_along_axis(chosen, unit, -1)
        centroids[past] = JUNK
        radius = np.where(past, JUNK, rng.random(past.shape)) if self.radii else None
        return Inputs(
            put(q, self.dtype),
            put(centroids, self.dtype),
            put(number, np.int32),
            put(radius, np.float32),
            put(unit),
            put(chosen),
        )


CASES = (
    Case("any"),
    Case("bfloat16", dtype="bfloat16", head_dim=128),
    Case("radii_bfloat16", radii=True, dtype="bfloat16"),
    Case("group_of_7", group=7, head_dim=40),
    Case("group_of_20", group=20, dtype="bfloat16", head_dim=96),
    Case("head_dim_256", head_dim=256, dtype="bfloat16"),
    Case("odd", head_dim=3, group=3, clusters=37),
    Case("one_centroid", batch=1, kv_heads=1, clusters=1, number="all"),
    Case("none", number=0),
    Case("many_blocks", clusters=901, dtype="bfloat16", head_dim=128),
    Case("float16", dtype="float16", head_dim=80, radii=True),
    Case("units", units=7),
    Case("units_many_blocks", clusters=901, units=64, dtype="bfloat16", head_dim=128),
)
