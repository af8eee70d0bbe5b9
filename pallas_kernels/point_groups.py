"""Groups of points around centroids, and their geometry."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

ROUNDING = 2.0**-18  # relative margin of radii over computed distances and points


class Groups(NamedTuple):
    """Centroids of groups of points, and the group of each point.

    Attributes:
        centroid: the mean of the group's points, of length 1 if the points are; in K's dtype.
        size: the number of points; an emptied group keeps its last centroid.
        of_point: the group of each point.
        radius: an upper bound of the distance of the group's points from the centroid; None if
            radii are not maintained.
    """

    centroid: Float[Array, "B K L H"]
    size: Int32[Array, "B K L"]
    of_point: Int32[Array, "B K C"]
    radius: Float32[Array, "B K L"] | None


def centroids_of(
    groups: Groups, some: Int32[Array, "B K n"] | None = None
) -> Float32[Array, "B K n H"]:
    """Returns the centroids of `some` groups, or of all, in float32."""
    centroid = groups.centroid
    if some is not None:
        centroid = jnp.take_along_axis(centroid, some[..., None], axis=2)
    return centroid.astype(jnp.float32)


def unit_length(x: Float32[Array, "*points H"]) -> Float32[Array, "*points H"]:
    """Scales vectors to length 1; zero vectors stay zero."""
    # divide by the largest channel first, so that no square overflows float32
    scale = jnp.max(jnp.abs(x), -1, keepdims=True)
    x = x / jnp.where(scale > 0, scale, 1.0)
    norm = jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    return x / jnp.where(norm > 0, norm, 1.0)


def distances(
    points: Float32[Array, "*n H"], centroid: Float32[Array, "*n H"]
) -> Float32[Array, "*n"]:
    """Returns the distance of each point from its centroid, rounded up."""
    away = jnp.sqrt(jnp.sum(jnp.square(points - centroid), -1))
    return away + ROUNDING * (away + jnp.max(jnp.abs(points), -1))
