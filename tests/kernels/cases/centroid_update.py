"""Cases of `centroid_update`. Missing groups of points are `JUNK`, to detect their use."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np

from jsparse.pallas_kernels.point_groups import Groups
from tests.kernels.cases.named import Named, put

JUNK = 10**9
Inputs = namedtuple("Inputs", "groups points radius group nth")


@dataclass(frozen=True)
class Case(Named):
    """A call of `centroid_update`.

    Attributes:
        new: n.
        groups: L; a third of them are empty.
        points: C.
        joined: the number of groups that the new points may join.
        radii: whether groups have radii.
        own: whether the new points also have radii.
    """

    batch: int = 3
    kv_heads: int = 2
    new: int = 7
    groups: int = 60
    points: int = 150
    joined: int = 4
    head_dim: int = 32
    dtype: str = "bfloat16"
    normalise: bool = True
    radii: bool = False
    own: bool = False

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads = (self.batch, self.kv_heads)
        centroid = rng.standard_normal((*heads, self.groups, self.head_dim))
        if self.normalise:
            centroid /= np.linalg.norm(centroid, axis=-1, keepdims=True)
        size = rng.integers(0, 3, (*heads, self.groups)) * rng.integers(1, 4)
        groups = Groups(
            put(centroid, self.dtype),
            put(size, np.int32),
            put(rng.integers(0, self.groups, (*heads, self.points)), np.int32),
            put(rng.random(size.shape), np.float32) if self.radii else None,
        )
        points = rng.standard_normal((*heads, self.new, self.head_dim))
        some = rng.integers(0, self.groups, (*heads, self.joined))
        group = np.take_along_axis(some, rng.integers(0, self.joined, (*heads, self.new)), -1)
        first = rng.integers(0, self.points - self.new + 1, (self.batch, 1))
        there = rng.integers(0, 2, (self.batch, self.new)) > 0
        there[0], there[-1, : self.batch // 2] = True, False
        group[np.broadcast_to(~there[:, None], group.shape)] = JUNK
        return Inputs(
            groups,
            put(points, np.float32),
            put(rng.random(group.shape), np.float32) if self.own else None,
            put(group, np.int32),
            put(np.where(there, first + np.arange(self.new), -1), np.int32),
        )


CASES = (
    Case("any"),
    Case("radii_of_points", radii=True, own=True, normalise=False),
    Case("float32", dtype="float32", radii=True, own=True),
    Case("all_in_one", joined=1, new=16, radii=True),
    Case("one_point", batch=1, kv_heads=1, new=1, joined=1, points=1, groups=1),
    Case("odd", new=23, joined=11, head_dim=40),
    Case("many_points", new=100, joined=30, head_dim=128, radii=True),
    Case("wide", new=3, joined=2, head_dim=256, normalise=False, radii=True),
)
