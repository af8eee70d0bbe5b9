"""Clusters chunks of a row's tokens by the direction of their keys, in every layer and KV head.

A chunk is represented by the mean of its keys. Spherical k-means forms clusters of `cluster_size`
chunks on average, initialised with every `cluster_size`-th chunk. Later chunks continue this: every
`cluster_size`-th founds a new cluster, and the others join the nearest one, whose centroid is
updated as a running mean. There is no randomness and the order of sums is fixed, so two runs give
the same bits.

Radii, if used, bound the distance between a centroid and the chunks of its cluster. Units group
clusters as clusters group chunks; there are ⌈√clusters⌉ of them, at most 64.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import CacheSpec, LayerCache, physical_pages, read_slots
from jsparse.pallas_kernels.group_means import group_means
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from jsparse.pallas_kernels.point_blocks import Blocks
from jsparse.pallas_kernels.point_groups import (
    ROUNDING,
    Groups,
    centroids_of,
    distances,
    unit_length,
)
from jsparse.policies.clusters.chunking import Chunks
from jsparse.shapes import Rows

CentroidPooling = Literal["mean", "max"]
ITERATIONS = 10
MAX_UNITS = 64


class Form(NamedTuple):
    """The static parameters of an index.

    Attributes:
        longest: the maximum number of tokens of a chunk.
        cluster_size: chunks per cluster, on average.
        pooling: how the keys of a chunk become one representative.
        normalise: whether representatives are scaled to length 1.
        radii: whether clusters have radii.
        units: whether there are units.
    """

    longest: int
    cluster_size: int
    pooling: CentroidPooling = "mean"
    normalise: bool = True
    radii: bool = False
    units: bool = False


class Clusters(NamedTuple):
    """One layer's index.

    Attributes:
        fine: clusters of chunks.
        coarse: units of clusters; None: no units.
        tokens: the number of tokens of each unit; None: no units.
    """

    fine: Groups
    coarse: Groups | None
    tokens: Int32[Array, "B K U"] | None


def num_clusters(chunks: Any, form: Form) -> Any:
    """Returns the number of clusters of the first `chunks` chunks of a row."""
    return -(-chunks // form.cluster_size)


def num_units(clusters: Int32[Array, "*rows"]) -> Int32[Array, "*rows"]:
    """Returns the number of units for a number of clusters, ⌈√clusters⌉ up to MAX_UNITS."""
    squares = jnp.arange(MAX_UNITS, dtype=jnp.int32) ** 2
    return jnp.sum(squares < clusters[..., None], -1, dtype=jnp.int32)


def max_units(clusters: int) -> int:
    """Returns `num_units` of a static number."""
    return min(MAX_UNITS, math.isqrt(clusters - 1) + 1)


def empty(spec: CacheSpec, chunks: int, form: Form) -> Clusters:
    """Returns an empty index of one layer, with room for `chunks` chunks per head."""
    clusters = num_clusters(chunks, form)
    fine = _no_groups(spec, clusters, chunks, form)
    if not form.units:
        return Clusters(fine, None, None)
    units = max_units(clusters)
    coarse = _no_groups(spec, units, clusters, form)
    return Clusters(fine, coarse, jnp.zeros((spec.batch, spec.num_kv_heads, units), jnp.int32))


def _no_groups(spec: CacheSpec, groups: int, points: int, form: Form) -> Groups:
    heads = spec.batch, spec.num_kv_heads
    return Groups(
        jnp.zeros((*heads, groups, spec.head_dim), spec.dtype),
        jnp.zeros((*heads, groups), jnp.int32),
        jnp.zeros((*heads, points), jnp.int32),
        jnp.zeros((*heads, groups), jnp.float32) if form.radii else None,
    )


def build(kv: LayerCache, chunks: Chunks, form: Form) -> Clusters:
    """Clusters all chunks of every row from scratch.

    Rows are processed one after the other, so that temporary memory does not grow with the batch.
    """
    pages = jnp.arange(kv.num_pages, dtype=jnp.int32)
    table = physical_pages(kv, jnp.broadcast_to(pages, (*kv.lengths.shape, pages.size)))

    def of_row(row: tuple[Array, Array, Chunks]) -> Clusters:
        table, lengths, its = jax.tree.map(lambda x: x[None], row)
        built = _build(kv._replace(block_table=table, lengths=lengths), its, form)
        return jax.tree.map(lambda x: x[0], built)

    return jax.lax.map(of_row, (table, kv.lengths, chunks))


def _build(kv: LayerCache, chunks: Chunks, form: Form) -> Clusters:
    lengths = jnp.diff(chunks.starts, axis=1)
    values = representatives(kv, chunks.starts[:, :-1], lengths, chunks.count, form)
    clusters = num_clusters(chunks.count, form)
    max_points = num_clusters(lengths.shape[1], form)
    starts = jnp.broadcast_to(
        jnp.arange(max_points, dtype=jnp.int32) * form.cluster_size, (len(clusters), max_points)
    )
    dtype = kv.k.dtype
    fine = k_means(values, chunks.count, starts, clusters, dtype, form)
    if not form.units:
        return Clusters(fine, None, None)
    coarse = units_of(fine, clusters, dtype, form)
    unit = jnp.take_along_axis(coarse.of_point, fine.of_point, axis=-1)
    there = jnp.arange(lengths.shape[1]) < chunks.count[:, None]
    row, head = (i[..., None] for i in jnp.indices(unit.shape[:2]))
    tokens = jnp.zeros(coarse.size.shape, jnp.int32)
    tokens = tokens.at[row, head, unit].add(jnp.where(there, lengths, 0)[:, None])
    return Clusters(fine, coarse, tokens)


def units_of(fine: Groups, clusters: Rows, dtype: Any, form: Form) -> Groups:
    """Groups the first `clusters` clusters of every row into units."""
    number = num_units(clusters)[:, None]
    nth = jnp.arange(max_units(fine.size.shape[2]), dtype=jnp.int32)
    starts = jnp.where(nth < number, nth * clusters[:, None] // jnp.maximum(number, 1), 0)
    points = centroids_of(fine)
    return k_means(points, clusters, starts, number[:, 0], dtype, form, fine.radius)


def representatives(
    kv: LayerCache,
    first: Int32[Array, "B C"],
    lengths: Int32[Array, "B C"],
    count: Rows,
    form: Form,
) -> Float32[Array, "B K C H"]:
    """Returns the pooled keys of each of the first `count` chunks of a row."""
    (rows, heads), number = kv.lengths.shape, first.shape[1]
    width = kv.k.shape[-1]
    blocks = Blocks.of(number, rows * heads * form.longest * width)

    def block(i: Array, values: Array) -> Array:
        some = blocks.cut(lengths, i, 1)
        keys = keys_of_chunks(kv, blocks.cut(first, i, 1), some, form.longest)
        return blocks.put(values, pooled(keys, some, form), i)

    values = jnp.zeros((rows, heads, number, width), jnp.float32)
    return blocks.run(count, block, values)


def keys_of_chunks(
    kv: LayerCache, first: Int32[Array, "B n"], lengths: Int32[Array, "B n"], longest: int
) -> Float[Array, "B K n m H"]:
    """Reads the keys of slots first … first + lengths - 1; undefined past a chunk's end."""
    (rows, heads), number = kv.lengths.shape, first.shape[1]
    nth = jnp.arange(longest, dtype=jnp.int32)
    inside = nth < lengths[..., None]
    slots = jnp.where(inside, first[..., None] + nth, 0).reshape(rows, 1, -1)
    slots = jnp.broadcast_to(slots, (rows, heads, slots.shape[-1]))
    return read_slots(kv.k, kv, slots).reshape(rows, heads, number, longest, -1)


def pooled(
    keys: Float[Array, "*layers B K n m H"], lengths: Int32[Array, "B n"], form: Form
) -> Float32[Array, "*layers B K n H"]:
    """Returns the pooled keys of chunks of `lengths` tokens; 0 for chunks without tokens."""
    inside = (jnp.arange(form.longest, dtype=jnp.int32) < lengths[..., None])[:, None, :, :, None]
    keys = keys.astype(jnp.float32)
    if form.pooling == "mean":
        number = jnp.maximum(lengths, 1)[:, None, :, None]
        made = jnp.sum(jnp.where(inside, keys, 0.0), -2) / number
    else:
        made = jnp.max(jnp.where(inside, keys, -jnp.inf), -2)
        made = jnp.where(inside.any(-2), made, 0.0)
    return unit_length(made) if form.normalise else made


def k_means(
    points: Float32[Array, "B K C H"],
    number: Rows,
    starts: Int32[Array, "B L"],
    groups: Rows,
    dtype: Any,
    form: Form,
    radius: Float32[Array, "B K C"] | None = None,
) -> Groups:
    """Groups the first `number` points of each row by spherical k-means.

    If every point starts a group, each group has one point.

    Args:
        points: the points to group, by direction.
        number: the number of points of a row.
        starts: the points that are the first centroids.
        groups: the number of groups of a row.
        dtype: the type of centroids, in which they are compared with points.
        form: whether centroids have length 1, and whether there are radii.
        radius: the points' own radii, which the groups' radii then include.
    """
    rows, heads, max_points, _ = points.shape
    max_groups = starts.shape[1]
    blocks = Blocks.of(max_points, rows * heads * max_groups)

    def direction(i: Array, made: Array) -> Array:
        return blocks.put(made, unit_length(blocks.cut(points, i, 2)).astype(dtype), i)

    directions = blocks.run(number, direction, jnp.zeros(points.shape, dtype))

    def averaged(values: Array, of_point: Array) -> tuple[Array, Array]:
        return group_means(values, of_point, number, groups, max_groups)

    def iterate(_: Array, made: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        centroid = made[0]
        of_point = nearest_centroid(directions, centroid, number, groups)
        means, sizes = averaged(directions, of_point)
        moved = unit_length(means).astype(dtype)
        return jnp.where(sizes[..., None] > 0, moved, centroid), of_point, sizes

    row, head = (i[..., None] for i in jnp.indices((rows, heads)))
    there = (jnp.arange(max_points) < number[:, None])[:, None]
    centroid = jnp.take_along_axis(directions, starts[:, None, :, None], axis=2)
    if max_groups == max_points:
        of_point = jnp.broadcast_to(
            jnp.arange(max_points, dtype=jnp.int32), (rows, heads, max_points)
        )
        sizes = jnp.broadcast_to(there, of_point.shape).astype(jnp.int32)
    else:
        of_point = jnp.zeros((rows, heads, max_points), jnp.int32)
        sizes = jnp.zeros((rows, heads, max_groups), jnp.int32)
        made = centroid, of_point, sizes
        centroid, of_point, sizes = jax.lax.fori_loop(0, ITERATIONS, iterate, made)
    if not form.normalise:
        raw = points if max_groups == max_points else averaged(points, of_point)[0]
        centroid = jnp.where(sizes[..., None] > 0, raw, centroid).astype(dtype)
    made = Groups(centroid, sizes, of_point, None)
    if not form.radii:
        return made
    away = distances(points, centroids_of(made, of_point))
    if radius is not None:
        away += radius * (1 + ROUNDING)
    farthest = jnp.zeros(sizes.shape, jnp.float32)
    farthest = farthest.at[row, head, of_point].max(jnp.where(there, away, 0.0))
    return made._replace(radius=farthest)
