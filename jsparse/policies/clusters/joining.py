"""Adds new chunks to the indices of all layers.

Only a few chunks are new at a time, and they change only a few groups, which are written in place
if the caller donates the indices.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.centroid_update import centroid_update
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from jsparse.pallas_kernels.point_groups import (
    ROUNDING,
    Groups,
    centroids_of,
    distances,
    unit_length,
)
from jsparse.policies.clusters.chunking import Chunks, chunks_after
from jsparse.policies.clusters.index import (
    Clusters,
    Form,
    keys_of_chunks,
    num_clusters,
    num_units,
    pooled,
)
from jsparse.shapes import Rows


class NewPoints(NamedTuple):
    """The new points; the same for all layers and heads.

    Attributes:
        nth: the index of each point among all points of the row.
        there: whether the point exists; False: padding.
        opens: whether the point founds a group.
        opened: the last group founded by the point or before it.
        had: the previous number of groups of the row.
    """

    nth: Int32[Array, "B n"]
    there: Bool[Array, "B n"]
    opens: Bool[Array, "B n"]
    opened: Int32[Array, "B n"]
    had: Rows


def join(
    layers: Sequence[Clusters],
    caches: Sequence[LayerCache],
    before: Rows,
    chunks: Chunks,
    max_new: int,
    form: Form,
) -> tuple[Clusters, ...]:
    """Adds the chunks after the first `before` of each row to the indices, at most `max_new`.

    All chunks of one call choose their clusters before any centroid moves. Their pooled keys are
    computed for all layers at once, since for a few chunks only launches take time.
    """
    nth, there, first, lengths = chunks_after(chunks, before, max_new)
    cluster, had = nth // form.cluster_size, num_clusters(before, form)
    fine = NewPoints(nth, there, nth % form.cluster_size == 0, cluster, had)

    # new clusters join a unit or found one; clusters that moved stay in theirs
    had, now = num_units(had), num_units(cluster + 1)
    opens = now > jnp.maximum(had[:, None], jnp.pad(now, [(0, 0), (1, 0)])[:, :-1])
    coarse = NewPoints(cluster, there & fine.opens, opens, now - 1, had)

    keys = jnp.stack([keys_of_chunks(kv, first, lengths, form.longest) for kv in caches])
    of_layers = pooled(keys, lengths, form)
    directions_of_layers = unit_length(of_layers).astype(keys.dtype)

    def joined(index: Clusters, points: Array, directions: Array) -> Clusters:
        made, group = add_points(index.fine, points, directions, None, fine, form)
        if index.coarse is None:
            return Clusters(made, None, None)
        centroid, radius = _members(made, group)
        directions = unit_length(centroid).astype(keys.dtype)
        units, _ = add_points(index.coarse, centroid, directions, radius, coarse, form)
        return _in_units(Clusters(made, units, index.tokens), group, lengths, there)

    each = zip(layers, of_layers, directions_of_layers, strict=True)
    return tuple(joined(*its) for its in each)


def _members(
    groups: Groups, group: Int32[Array, "B K n"]
) -> tuple[Float32[Array, "B K n H"], Float32[Array, "B K n"] | None]:
    """Returns the centroids and radii of some groups."""
    centroid = centroids_of(groups, group)
    if groups.radius is None:
        return centroid, None
    return centroid, jnp.take_along_axis(groups.radius, group, axis=2)


def _in_units(
    index: Clusters,
    group: Int32[Array, "B K n"],
    lengths: Int32[Array, "B n"],
    there: Bool[Array, "B n"],
) -> Clusters:
    """Adds the new tokens to their units, and widens the units' radii."""
    fine, coarse, tokens = index
    assert coarse is not None
    assert tokens is not None
    unit = jnp.take_along_axis(coarse.of_point, group, axis=2)
    row, head = (i[..., None] for i in jnp.indices(group.shape[:2]))
    tokens = tokens.at[row, head, unit].add(lengths[:, None])
    if coarse.radius is not None:
        (centroid, radius), (center, _) = _members(fine, group), _members(coarse, unit)
        assert radius is not None
        reach = distances(centroid, center) + radius * (1 + ROUNDING)
        reach = jnp.where(there[:, None], reach, 0.0)
        coarse = coarse._replace(radius=coarse.radius.at[row, head, unit].max(reach))
    return Clusters(fine, coarse, tokens)


def add_points(
    groups: Groups,
    points: Float32[Array, "B K n H"],
    directions: Float[Array, "B K n H"],
    radius: Float32[Array, "B K n"] | None,
    new: NewPoints,
    form: Form,
) -> tuple[Groups, Int32[Array, "B K n"]]:
    """Adds new points to a layer's groups; `radius` is the points' own.

    Their directions have the type in which points are compared with centroids.

    Points that found a group belong to it. The others belong to the nearest of the row's previous
    groups, or, if it had none, to the group founded last. A centroid becomes the mean of its old
    and new points.

    Returns:
        The groups, and each point's group; 0 for points that do not exist.
    """
    nth = jnp.arange(1, new.there.shape[1] + 1, dtype=jnp.int32)
    number = jnp.max(jnp.where(new.there, nth, 0), -1)
    centroid = groups.centroid
    if not form.normalise:
        centroid = unit_length(centroids_of(groups)).astype(directions.dtype)
    chosen = nearest_centroid(directions, centroid, number, new.had)
    own = new.opens | (new.had == 0)[:, None]
    group = jnp.where(own[:, None], new.opened[:, None], chosen)
    group = jnp.where(new.there[:, None], group, 0)
    at = jnp.where(new.there, new.nth, -1)
    return centroid_update(groups, points, radius, group, at, normalise=form.normalise), group
