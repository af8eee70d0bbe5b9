"""Implements `api.centroid_update` in plain jnp: the CPU path and the kernel's oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jsparse.cache import rounded_to
from jsparse.pallas_kernels.point_groups import (
    ROUNDING,
    Groups,
    centroids_of,
    distances,
    unit_length,
)


def centroid_update(
    groups: Groups,
    points: Float32[Array, "B K n H"],
    radius: Float32[Array, "B K n"] | None,
    group: Int32[Array, "B K n"],
    nth: Int32[Array, "B n"],
    *,
    normalise: bool,
) -> Groups:
    """Implements `api.centroid_update` in plain jnp.

    It computes the joined group once for each new point; points of one group write equal results.
    """
    there = (nth >= 0)[:, None]
    group = jnp.where(there, group, 0)
    old = centroids_of(groups, group)
    had = jnp.take_along_axis(groups.size, group, axis=2)
    same = (group[..., :, None] == group[..., None, :]) & there[:, :, None]
    added = jnp.einsum(
        "...mn,...nh->...mh",
        same.astype(jnp.float32),
        points,
        precision=jax.lax.Precision.HIGHEST,
    )
    size = had + jnp.sum(same, -1, dtype=jnp.int32)
    centroid = (had[..., None] * old + added) / jnp.maximum(size, 1)[..., None]
    if normalise:
        centroid = unit_length(centroid)
    # radii start at the stored (rounded) centroid
    stored = rounded_to(centroid, groups.centroid.dtype)
    centroid = stored.astype(jnp.float32)

    row, head = (i[..., None] for i in jnp.indices(group.shape[:2]))
    into = jnp.where(there, group, groups.size.shape[-1])
    at = jnp.where(nth >= 0, nth, groups.of_point.shape[-1])[:, None]
    made = Groups(
        groups.centroid.at[row, head, into].set(stored, mode="drop"),
        groups.size.at[row, head, into].set(size, mode="drop"),
        groups.of_point.at[row, head, at].set(group, mode="drop"),
        None,
    )
    if groups.radius is None:
        return made
    own = distances(points, centroid) + (0.0 if radius is None else radius)
    grown = jnp.take_along_axis(groups.radius, group, axis=2)
    grown += jnp.sqrt(jnp.sum(jnp.square(centroid - old), -1))
    grown = jnp.where(had > 0, grown, 0.0)
    others = jnp.max(jnp.where(same, own[..., None, :], 0.0), -1)  # new points of the same group
    grown = jnp.maximum(grown, others) * (1 + ROUNDING)
    return made._replace(radius=groups.radius.at[row, head, into].set(grown, mode="drop"))
