"""Builds the inputs that tests and benchmarks share: named cases, each from a seed.

Centroids and radii past a head's number, or in no chosen unit, are `JUNK`, so that reading them
shows.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

JUNK = np.nan


class Inputs(NamedTuple):
    """Holds the op's arrays."""

    q: jnp.ndarray
    centroids: jnp.ndarray
    number: jnp.ndarray
    radius: jnp.ndarray | None
    unit: jnp.ndarray | None
    chosen: jnp.ndarray | None


@dataclass(frozen=True)
class Case:
    """Describes the shapes and contents of one call, with the letters of jsparse.shapes.

    Attributes:
        group: G.
        clusters: L.
        number: centroids of a head: "any" number, L and 0 among them; "all" L; or that many.
        radii: whether centroids have radii.
        units: U; 0 is none. A quarter of a head's units are chosen, none of the second head's.
        dtype: type of queries and centroids.
    """

    name: str
    batch: int = 2
    kv_heads: int = 3
    group: int = 4
    clusters: int = 40
    head_dim: int = 64
    number: Literal["any", "all"] | int = "any"
    radii: bool = False
    units: int = 0
    dtype: str = "float32"

    def build(self, seed: int = 0) -> Inputs:
        """Builds the arrays; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
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
            unit, chosen = jax.device_put(unit), jax.device_put(chosen)
        centroids[past] = JUNK
        radius = None
        if self.radii:
            radius = jax.device_put(
                np.asarray(np.where(past, JUNK, rng.random(past.shape)), np.float32)
            )
        q, centroids = (jax.device_put(np.asarray(x, self.dtype)) for x in (q, centroids))
        number = jax.device_put(np.asarray(number, np.int32))
        return Inputs(q, centroids, number, radius, unit, chosen)


CASES = (
    Case("any"),
    Case("bfloat16", dtype="bfloat16", head_dim=128),
    Case("radii", radii=True, head_dim=32),
    Case("radii_bfloat16", radii=True, dtype="bfloat16"),
    Case("one_query_head", group=1, dtype="bfloat16"),
    Case("group_of_7", group=7, head_dim=40),
    Case("group_of_20", group=20, dtype="bfloat16", head_dim=96),
    Case("head_dim_256", head_dim=256, dtype="bfloat16"),
    Case("head_dim_256_float32", head_dim=256, radii=True),
    Case("odd", head_dim=3, group=3, clusters=37),
    Case("one_centroid", batch=1, kv_heads=1, clusters=1, number="all"),
    Case("none", number=0),
    Case("many_blocks", clusters=901, dtype="bfloat16", head_dim=128),
    Case("float16", dtype="float16", head_dim=80, radii=True),
    Case("units", units=7),
    Case("units_radii_bfloat16", clusters=301, units=18, radii=True, dtype="bfloat16"),
    Case("one_unit", units=1, number="all", group=1),
    Case("units_many_blocks", clusters=901, units=64, dtype="bfloat16", head_dim=128),
)
