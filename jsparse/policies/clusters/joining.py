"""Adds new chunks to the indices of all layers.

Only a few chunks are new at a time, and they change only a few groups. Each layer's keys and
centroids are read, and its changed groups written, on their own. Everything in between is computed
for all layers at once, in few launches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from jsparse.policies.clusters.chunking import Chunks
from jsparse.policies.clusters.index import (
    ROUNDING,
    Clusters,
    Form,
    Groups,
    distances,
    num_clusters,
    num_units,
    pooled_keys,
    unit_length,
)
from jsparse.shapes import Rows


class New(NamedTuple):
    """Describes each new point; this is the same for all layers and heads.

    Attributes:
        nth: its index among all points of the row.
        there: whether the point exists; False pads.
        opens: whether it founds a group.
        opened: the group founded last, by it or before it.
        had: the number of groups that the row had.

    In shapes, Y is the number of layers.
    """

    nth: Int32[Array, "B n"]
    there: Bool[Array, "B n"]
    opens: Bool[Array, "B n"]
    opened: Int32[Array, "B n"]
    had: Rows


class Touched(NamedTuple):
    """Holds, for each new point, the group that it joins; points of one group hold equal values."""

    centroid: Float32[Array, "*heads n H"]
    size: Int32[Array, "*heads n"]
    radius: Float32[Array, "*heads n"] | None


def join(
    layers: Sequence[Clusters],
    caches: Sequence[LayerCache],
    before: Rows,
    chunks: Chunks,
    most_new: int,
    form: Form,
) -> tuple[Clusters, ...]:
    """Add to the indices the chunks behind the first `before` of each row, at most `most_new`.

    All chunks of one call choose their clusters before any centroid moves.
    """
    nth = before[:, None] + jnp.arange(most_new, dtype=jnp.int32)
    there = nth < chunks.count[:, None]
    at = jnp.where(there, nth, 0)
    first = jnp.take_along_axis(chunks.starts, at, axis=1)
    lengths = jnp.where(there, jnp.take_along_axis(chunks.starts, at + 1, axis=1) - first, 0)
    points = jnp.stack([pooled_keys(held, first, lengths, form) for held in caches])

    cluster, had = nth // form.cluster_size, num_clusters(before, form)
    new = New(nth, there, nth % form.cluster_size == 0, cluster, had)
    fine, group, touched = add_points([index.fine for index in layers], points, None, new, form)
    if not form.units:
        return tuple(Clusters(groups, None, None) for groups in fine)

    # clusters that are new join a unit or found one; those that moved stay in theirs
    had, now = num_units(had), num_units(cluster + 1)
    opens = now > jnp.maximum(had[:, None], jnp.pad(now, [(0, 0), (1, 0)])[:, :-1])
    new = New(cluster, there & new.opens, opens, now - 1, had)
    coarse = [index.coarse for index in layers if index.coarse is not None]
    coarse, _, _ = add_points(coarse, touched.centroid, touched.radius, new, form)
    made = zip(layers, fine, coarse, group, _layers(touched), strict=True)
    return tuple(
        _in_units(Clusters(groups, units, index.tokens), its, of_layer, lengths, there)
        for index, groups, units, its, of_layer in made
    )


def _in_units(
    index: Clusters,
    group: Int32[Array, "B K n"],
    touched: Touched,
    lengths: Int32[Array, "B n"],
    there: Bool[Array, "B n"],
) -> Clusters:
    """Add the new tokens to their units, and widen the units' radii."""
    coarse, tokens = index.coarse, index.tokens
    assert coarse is not None
    assert tokens is not None
    unit = jnp.take_along_axis(coarse.of_point, group, axis=2)
    row, head = (i[..., None] for i in jnp.indices(group.shape[:2]))
    tokens = tokens.at[row, head, unit].add(lengths[:, None])
    if coarse.radius is not None and touched.radius is not None:
        centroid = jnp.take_along_axis(coarse.centroid, unit[..., None], axis=2)
        reach = distances(touched.centroid, centroid.astype(jnp.float32))
        reach += touched.radius * (1 + ROUNDING)
        reach = jnp.where(there[:, None], reach, 0.0)
        coarse = coarse._replace(radius=coarse.radius.at[row, head, unit].max(reach))
    return Clusters(index.fine, coarse, tokens)


def add_points(
    groups: Sequence[Groups],
    points: Float32[Array, "Y B K n H"],
    radius: Float32[Array, "Y B K n"] | None,
    new: New,
    form: Form,
) -> tuple[list[Groups], Int32[Array, "Y B K n"], Touched]:
    """Add new points to the groups of each layer.

    Points that found a group belong to it. The others belong to the nearest of those that a row
    had, and where it had none to the one founded last. A centroid becomes the mean of its old and
    new points. `radius` is the points' own.

    Returns:
        The groups, each point's group, and that group as it is afterwards.
    """
    dtype = groups[0].centroid.dtype
    nth = jnp.arange(1, new.there.shape[1] + 1, dtype=jnp.int32)
    number = jnp.max(jnp.where(new.there, nth, 0), -1)
    directions = unit_length(points).astype(dtype)
    chosen = jnp.stack(
        [
            nearest_centroid(some, _directions(its, form), number, new.had)
            for some, its in zip(directions, groups, strict=True)
        ]
    )
    own = new.opens | (new.had == 0)[:, None]
    group = jnp.where(own[:, None], new.opened[:, None], chosen)
    group = jnp.where(new.there[:, None], group, 0)  # the others could lie past the last group
    each = [_touched(its, at) for its, at in zip(groups, group, strict=True)]
    touched = jax.tree.map(lambda *layers: jnp.stack(layers), *each)
    after = _moved(touched, points, radius, group, new.there, dtype, form)
    made = [
        _put(its, at, of_layer, new)
        for its, at, of_layer in zip(groups, group, _layers(after), strict=True)
    ]
    return made, group, after


def _directions(groups: Groups, form: Form) -> Array:
    """Return centroids of length 1."""
    if form.normalise:
        return groups.centroid
    return unit_length(groups.centroid.astype(jnp.float32)).astype(groups.centroid.dtype)


def _touched(groups: Groups, group: Int32[Array, "B K n"]) -> Touched:
    centroid = jnp.take_along_axis(groups.centroid, group[..., None], axis=2)
    return Touched(
        centroid.astype(jnp.float32),
        jnp.take_along_axis(groups.size, group, axis=2),
        None if groups.radius is None else jnp.take_along_axis(groups.radius, group, axis=2),
    )


def _moved(
    touched: Touched,
    points: Float32[Array, "Y B K n H"],
    radius: Float32[Array, "Y B K n"] | None,
    group: Int32[Array, "Y B K n"],
    there: Bool[Array, "B n"],
    dtype: jnp.dtype,
    form: Form,
) -> Touched:
    """Return the groups after the new points have joined; centroids are rounded to `dtype`."""
    same = (group[..., :, None] == group[..., None, :]) & there[:, None, None]
    added = jnp.einsum(
        "...mn,...nh->...mh",
        same.astype(jnp.float32),
        points,
        precision=jax.lax.Precision.HIGHEST,
    )
    size = touched.size + jnp.sum(same, -1, dtype=jnp.int32)
    centroid = touched.size[..., None] * touched.centroid + added
    centroid /= jnp.maximum(size, 1)[..., None]
    if form.normalise:
        centroid = unit_length(centroid)
    centroid = centroid.astype(dtype).astype(jnp.float32)
    if touched.radius is None:
        return Touched(centroid, size, None)
    own = distances(points, centroid) + (0.0 if radius is None else radius)
    old = touched.radius + jnp.sqrt(jnp.sum(jnp.square(centroid - touched.centroid), -1))
    old = jnp.where(touched.size > 0, old, 0.0)
    others = jnp.max(jnp.where(same, own[..., None, :], 0.0), -1)  # of the same group, new as well
    return Touched(centroid, size, jnp.maximum(old, others) * (1 + ROUNDING))


def _put(groups: Groups, group: Int32[Array, "B K n"], touched: Touched, new: New) -> Groups:
    """Write back the groups of the points that are there; those of one group write the same."""
    row, head = (i[..., None] for i in jnp.indices(group.shape[:2]))
    into = jnp.where(new.there[:, None], group, groups.size.shape[-1])
    at = jnp.where(new.there, new.nth, groups.of_point.shape[-1])[:, None]
    radius = groups.radius
    if radius is not None and touched.radius is not None:
        radius = radius.at[row, head, into].set(touched.radius, mode="drop")
    centroid = touched.centroid.astype(groups.centroid.dtype)
    return Groups(
        groups.centroid.at[row, head, into].set(centroid, mode="drop"),
        groups.size.at[row, head, into].set(touched.size, mode="drop"),
        groups.of_point.at[row, head, at].set(group, mode="drop"),
        radius,
    )


def _layers(touched: Touched) -> list[Touched]:
    """Split stacked layers."""
    return [jax.tree.map(lambda x, i=i: x[i], touched) for i in range(touched.size.shape[0])]
