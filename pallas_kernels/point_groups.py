"""Defines Groups of points around centroids, and the measures that go with them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8, Int32, Num

MAX_BYTE = 127  # of a channel of a centroid that is held in bytes
ROUNDING = 2.0**-18  # the part of distances, and of points, by which radii exceed the computed ones


class Groups(NamedTuple):
    """Holds centroids of groups of points, and which group each point is in.

    Attributes:
        centroid: the mean of the group's points, of length 1 if these are; in K's dtype, or with
            `scale` and `middle` int8: the mean is then centroid · scale + middle.
        size: the number of points; a group without any keeps the centroid that it had.
        of_point: the group of each point.
        radius: no point of the group is farther from the centroid; None if radii are not kept.
        scale: the scale of each centroid; None for those that are not in bytes.
        middle: what all centroids of a head have in common and their bytes leave out; None
            likewise.
    """

    centroid: Num[Array, "B K L H"]
    size: Int32[Array, "B K L"]
    of_point: Int32[Array, "B K C"]
    radius: Float32[Array, "B K L"] | None
    scale: Float32[Array, "B K L"] | None = None
    middle: Float32[Array, "B K H"] | None = None


def in_bytes(
    x: Float32[Array, "*n H"], middle: Float32[Array, "*#n H"]
) -> tuple[Int8[Array, "*n H"], Float32[Array, "*n"]]:
    """Returns the vectors of bytes times a scale each, without `middle`: x to half a scale."""
    x = x - middle
    scale = jnp.max(jnp.abs(x), -1) / MAX_BYTE
    codes = jnp.floor(x / jnp.where(scale > 0, scale, 1.0)[..., None] + 0.5)
    return jnp.clip(codes, -MAX_BYTE, MAX_BYTE).astype(jnp.int8), scale


def held_in_bytes(groups: Groups) -> Groups:
    """Returns groups with their centroids in bytes, around the mean of those that have points."""
    centroid, there = groups.centroid.astype(jnp.float32), groups.size > 0
    total = jnp.sum(jnp.where(there[..., None], centroid, 0.0), 2)
    middle = total / jnp.maximum(jnp.sum(there, -1), 1)[..., None]
    codes, scale = in_bytes(centroid, middle[:, :, None])
    return groups._replace(centroid=codes, scale=scale, middle=middle)


def centroids_of(
    groups: Groups, some: Int32[Array, "B K n"] | None = None
) -> Float32[Array, "B K n H"]:
    """Returns the centroids of `some` groups, or of all, in float32."""

    def chosen(x: Array) -> Array:
        if some is None:
            return x
        return jnp.take_along_axis(x, some.reshape(*some.shape, *[1] * (x.ndim - 3)), axis=2)

    centroid = chosen(groups.centroid).astype(jnp.float32)
    if groups.scale is None or groups.middle is None:
        return centroid
    return centroid * chosen(groups.scale)[..., None] + groups.middle[:, :, None]


def unit_length(x: Float32[Array, "*points H"]) -> Float32[Array, "*points H"]:
    """Scales vectors to length 1; those of length 0 stay."""
    # by the largest channel first, so that no square leaves float32's range
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
