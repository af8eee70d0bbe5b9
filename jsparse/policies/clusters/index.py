"""Clusters chunks of a row's tokens by the direction of their keys, in every layer and KV head.

A chunk is represented by the mean of its keys. Spherical k-means gathers `cluster_size` chunks to a
cluster on average: every `cluster_size`-th chunk is the start of one. Chunks that come later
continue this: every `cluster_size`-th founds a cluster of its own, the others join the nearest one,
whose centroid moves by running mean. Nothing is drawn at random and nothing summed in an order of
chance, so that two runs give the same bits.

Radii, where they are kept, bound the distance between a centroid and the chunks of its cluster.
Units gather clusters as clusters gather chunks; there are ⌈√clusters⌉ of them, at most 64.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import CacheSpec, LayerCache, physical_pages, read_slots
from jsparse.policies.clusters.chunking import Chunks
from jsparse.shapes import Queries, Rows

Pooling = Literal["mean", "max"]
ITERATIONS = 10
MOST_UNITS = 64
BLOCK_BYTES = 2**27  # of the largest array that exists per block of chunks
ROUNDING = 2.0**-18  # the part of distances, and of points, by which radii exceed what is computed


class Form(NamedTuple):
    """Holds what an index is made by; all of it is static.

    Attributes:
        longest: the most tokens of a chunk.
        cluster_size: chunks per cluster, on average.
        pooling: how the keys of a chunk become one.
        normalise: whether these are scaled to length 1.
        radii: whether radii are kept.
        units: whether units are kept.
    """

    longest: int
    cluster_size: int
    pooling: Pooling = "mean"
    normalise: bool = True
    radii: bool = False
    units: bool = False


class Groups(NamedTuple):
    """Holds centroids of groups of points, and which group each point is in.

    Attributes:
        centroid: the mean of the group's points, of length 1 if these are; in K's dtype.
        size: the number of points; a group without any keeps the centroid that it had.
        of_point: the group of each point.
        radius: no point of the group is farther from the centroid; None if radii are not kept.
    """

    centroid: Float[Array, "B K L H"]
    size: Int32[Array, "B K L"]
    of_point: Int32[Array, "B K C"]
    radius: Float32[Array, "B K L"] | None


class Clusters(NamedTuple):
    """Holds one layer's index.

    Attributes:
        fine: clusters of chunks.
        coarse: units of clusters; None if there are none.
        tokens: the number of tokens of each unit; None likewise.
    """

    fine: Groups
    coarse: Groups | None
    tokens: Int32[Array, "B K U"] | None


class Blocks(NamedTuple):
    """Cuts an axis of `most` points into blocks of one size; the last overlaps the one before."""

    most: int
    size: int

    @classmethod
    def of(cls, most: int, numbers_each: int) -> "Blocks":
        """Make blocks as large as BLOCK_BYTES allow where a point has `numbers_each` numbers."""
        fitting = max(BLOCK_BYTES // (4 * numbers_each), 1)
        return cls(most, min(1 << (fitting.bit_length() - 1), most))

    def first(self, i: Array) -> Array:
        """Return the first point of block i."""
        return jnp.minimum(i * self.size, self.most - self.size)

    def fresh(self, i: Array, number: Rows) -> Bool[Array, "B m"]:
        """Mark the points of block i that no block before had, among a row's first `number`."""
        at = self.first(i) + jnp.arange(self.size, dtype=jnp.int32)
        return (at >= i * self.size) & (at < number[:, None])

    def cut(self, x: Array, i: Array, axis: int) -> Array:
        """Return block i of an array."""
        return jax.lax.dynamic_slice_in_dim(x, self.first(i), self.size, axis)

    def put(self, whole: Array, part: Array, i: Array) -> Array:
        """Write block i of [B, K, C, …]."""
        return jax.lax.dynamic_update_slice_in_dim(whole, part, self.first(i), 2)

    def run(self, number: Rows, block: Callable[[Array, Any], Any], carry: Any) -> Any:
        """Go through the blocks that hold the first `number` points of the longest row."""
        return jax.lax.fori_loop(0, -(-jnp.max(number) // self.size), block, carry)


def num_clusters(chunks: Any, form: Form) -> Any:
    """Return the number of clusters of the first `chunks` chunks of a row."""
    return -(-chunks // form.cluster_size)


def num_units(clusters: Rows) -> Rows:
    """Return the number of units of a number of clusters, ⌈√clusters⌉ as far as MOST_UNITS."""
    squares = jnp.arange(MOST_UNITS, dtype=jnp.int32) ** 2
    return jnp.sum(squares < clusters[..., None], -1, dtype=jnp.int32)


def most_units(clusters: int) -> int:
    """Return what `num_units` is of a number that is known while tracing."""
    return min(MOST_UNITS, math.isqrt(clusters - 1) + 1)


def empty(spec: CacheSpec, chunks: int, form: Form) -> Clusters:
    """Return the index of one layer that holds nothing, with room for `chunks` chunks per head."""
    clusters = num_clusters(chunks, form)
    fine = _no_groups(spec, clusters, chunks, form)
    if not form.units:
        return Clusters(fine, None, None)
    units = most_units(clusters)
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


def build(held: LayerCache, chunks: Chunks, form: Form) -> Clusters:
    """Cluster all chunks of every row anew.

    Rows are taken one after the other, so that what exists meanwhile does not grow with the batch.
    """
    pages = jnp.arange(held.num_pages, dtype=jnp.int32)
    table = physical_pages(held, jnp.broadcast_to(pages, (*held.lengths.shape, pages.size)))

    def of_row(row: tuple[Array, Array, Chunks]) -> Clusters:
        table, lengths, its = jax.tree.map(lambda x: x[None], row)
        built = _build(held._replace(block_table=table, lengths=lengths), its, form)
        return jax.tree.map(lambda x: x[0], built)

    return jax.lax.map(of_row, (table, held.lengths, chunks))


def _build(held: LayerCache, chunks: Chunks, form: Form) -> Clusters:
    lengths = jnp.diff(chunks.starts, axis=1)
    values = representatives(held, chunks.starts[:, :-1], lengths, chunks.count, form)
    clusters = num_clusters(chunks.count, form)
    most = num_clusters(lengths.shape[1], form)
    starts = jnp.broadcast_to(
        jnp.arange(most, dtype=jnp.int32) * form.cluster_size, (len(clusters), most)
    )
    fine = k_means(values, chunks.count, starts, clusters, held.k.dtype, form)
    if not form.units:
        return Clusters(fine, None, None)
    number = num_units(clusters)[:, None]
    nth = jnp.arange(most_units(most), dtype=jnp.int32)
    starts = jnp.where(nth < number, nth * clusters[:, None] // jnp.maximum(number, 1), 0)
    points = fine.centroid.astype(jnp.float32)
    coarse = k_means(points, clusters, starts, number[:, 0], held.k.dtype, form, fine.radius)
    unit = jnp.take_along_axis(coarse.of_point, fine.of_point, axis=-1)
    there = jnp.arange(lengths.shape[1]) < chunks.count[:, None]
    row, head = (i[..., None] for i in jnp.indices(unit.shape[:2]))
    tokens = jnp.zeros(coarse.size.shape, jnp.int32)
    tokens = tokens.at[row, head, unit].add(jnp.where(there, lengths, 0)[:, None])
    return Clusters(fine, coarse, tokens)


def representatives(
    held: LayerCache,
    first: Int32[Array, "B C"],
    lengths: Int32[Array, "B C"],
    count: Rows,
    form: Form,
) -> Float32[Array, "B K C H"]:
    """Return what stands for each of the first `count` chunks of a row: its keys, pooled."""
    (rows, heads), number = held.lengths.shape, first.shape[1]
    width = held.k.shape[-1]
    blocks = Blocks.of(number, rows * heads * form.longest * width)

    def block(i: Array, values: Array) -> Array:
        pooled = pooled_keys(held, blocks.cut(first, i, 1), blocks.cut(lengths, i, 1), form)
        return blocks.put(values, pooled, i)

    values = jnp.zeros((rows, heads, number, width), jnp.float32)
    return blocks.run(count, block, values)


def pooled_keys(
    held: LayerCache, first: Int32[Array, "B n"], lengths: Int32[Array, "B n"], form: Form
) -> Float32[Array, "B K n H"]:
    """Pool the keys of slots first … first + lengths - 1; chunks without tokens give 0."""
    (rows, heads), number = held.lengths.shape, first.shape[1]
    nth = jnp.arange(form.longest, dtype=jnp.int32)
    inside = nth < lengths[..., None]
    slots = jnp.where(inside, first[..., None] + nth, 0).reshape(rows, 1, -1)
    slots = jnp.broadcast_to(slots, (rows, heads, slots.shape[-1]))
    keys = read_slots(held.k, held, slots).reshape(rows, heads, number, form.longest, -1)
    keys, inside = keys.astype(jnp.float32), inside[:, None, :, :, None]
    if form.pooling == "mean":
        number = jnp.maximum(lengths, 1)[:, None, :, None]
        pooled = jnp.sum(jnp.where(inside, keys, 0.0), 3) / number
    else:
        pooled = jnp.max(jnp.where(inside, keys, -jnp.inf), 3)
        pooled = jnp.where(inside.any(3), pooled, 0.0)
    return unit_length(pooled) if form.normalise else pooled


def unit_length(x: Float32[Array, "*points H"]) -> Float32[Array, "*points H"]:
    """Scale vectors to length 1; those of length 0 stay."""
    # by the largest channel first, so that no square leaves float32's range
    scale = jnp.max(jnp.abs(x), -1, keepdims=True)
    x = x / jnp.where(scale > 0, scale, 1.0)
    norm = jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    return x / jnp.where(norm > 0, norm, 1.0)


def k_means(
    points: Float32[Array, "B K C H"],
    number: Rows,
    starts: Int32[Array, "B L"],
    groups: Rows,
    dtype: Any,
    form: Form,
    radius: Float32[Array, "B K C"] | None = None,
) -> Groups:
    """Group the first `number` points of each row by spherical k-means.

    Where every point starts a group it stays alone in it.

    Args:
        points: what is grouped, by direction.
        number: the number of points of a row.
        starts: the points that are the first centroids.
        groups: the number of groups of a row.
        dtype: the type of centroids, in which points meet them.
        form: whether centroids have length 1, and whether there are radii.
        radius: the points' own radii, which the groups' then take in.
    """
    rows, heads, most, width = points.shape
    nth = jnp.arange(starts.shape[1], dtype=jnp.int32)
    real = nth < groups[:, None]
    blocks = Blocks.of(most, rows * heads * nth.size)

    def direction(i: Array, made: Array) -> Array:
        return blocks.put(made, unit_length(blocks.cut(points, i, 2)).astype(dtype), i)

    directions = blocks.run(number, direction, jnp.zeros(points.shape, dtype))

    def means(values: Array, of_point: Array, sizes: Array) -> Array:
        """Average the values of each group's points."""

        def block(i: Array, sums: Array) -> Array:
            some = blocks.cut(values, i, 2)
            inside = blocks.cut(of_point, i, 2)[..., None] == nth
            inside &= blocks.fresh(i, number)[:, None, :, None]
            # products add in an order that is always the same, as scattering does not
            return sums + jnp.einsum(
                "bkml,bkmh->bklh",
                inside.astype(some.dtype),
                some,
                preferred_element_type=jnp.float32,
                precision=jax.lax.Precision.HIGHEST,
            )

        sums = blocks.run(number, block, jnp.zeros((rows, heads, nth.size, width), jnp.float32))
        return sums / jnp.maximum(sizes, 1)[..., None]

    def counted(of_point: Array) -> Array:
        sizes = jnp.zeros((rows, heads, nth.size), jnp.int32)
        return sizes.at[row, head, of_point].add(there)

    def iterate(_: Array, made: tuple[Array, Array]) -> tuple[Array, Array]:
        def block(i: Array, of_point: Array) -> Array:
            return blocks.put(of_point, nearest(blocks.cut(directions, i, 2), made[0], real), i)

        of_point = blocks.run(number, block, made[1])
        sizes = counted(of_point)
        moved = unit_length(means(directions, of_point, sizes)).astype(dtype)
        return jnp.where(sizes[..., None] > 0, moved, made[0]), of_point

    row, head = (i[..., None] for i in jnp.indices((rows, heads)))
    there = (jnp.arange(most) < number[:, None])[:, None].astype(jnp.int32)
    centroid = jnp.take_along_axis(directions, starts[:, None, :, None], axis=2)
    if nth.size == most:
        of_point = jnp.broadcast_to(nth, (rows, heads, most))
    else:
        of_point = jnp.zeros((rows, heads, most), jnp.int32)
        centroid, of_point = jax.lax.fori_loop(0, ITERATIONS, iterate, (centroid, of_point))
    sizes = counted(of_point)
    if not form.normalise:
        raw = points if nth.size == most else means(points, of_point, sizes)
        centroid = jnp.where(sizes[..., None] > 0, raw, centroid).astype(dtype)
    made = Groups(centroid, sizes, of_point, None)
    if not form.radii:
        return made
    of_points = jnp.take_along_axis(centroid, of_point[..., None], axis=2).astype(jnp.float32)
    away = distances(points, of_points)
    if radius is not None:
        away += radius * (1 + ROUNDING)
    farthest = jnp.zeros(sizes.shape, jnp.float32)
    farthest = farthest.at[row, head, of_point].max(jnp.where(there > 0, away, 0.0))
    return made._replace(radius=farthest)


def nearest(
    points: Float[Array, "B K m H"],
    centroid: Float[Array, "B K L H"],
    real: Bool[Array, "B L"],
) -> Int32[Array, "B K m"]:
    """Return the real group whose centroid's direction is nearest to that of each point."""
    products = jnp.einsum("bkmh,bklh->bkml", points, centroid, preferred_element_type=jnp.float32)
    products = jnp.where(real[:, None, None], products, -jnp.inf)
    return jnp.argmax(products, axis=-1).astype(jnp.int32)


def distances(
    points: Float32[Array, "*n H"], centroid: Float32[Array, "*n H"]
) -> Float32[Array, "*n"]:
    """Return the distance of each point from its centroid, rounded up."""
    away = jnp.sqrt(jnp.sum(jnp.square(points - centroid), -1))
    return away + ROUNDING * (away + jnp.max(jnp.abs(points), -1))


def best_products(
    q: Queries, centers: Float[Array, "B K L H"], radius: Float32[Array, "B K L"] | None
) -> Float32[Array, "B K L"]:
    """Return the largest q·center of the query heads of each KV head.

    With radii it is the largest q·center + |q| · radius, which no vector exceeds that lies within
    the radius of the center.
    """
    q = q.reshape(*centers.shape[:2], -1, q.shape[-1])
    products = jnp.einsum("bkgh,bklh->bkgl", q, centers, preferred_element_type=jnp.float32)
    if radius is not None:
        length = jnp.sqrt(jnp.sum(jnp.square(q.astype(jnp.float32)), -1, keepdims=True))
        products += length * radius[:, :, None]
    return jnp.max(products, axis=2)


def relevance(groups: Groups, q: Queries) -> Float32[Array, "B K L"]:
    """Return what groups are ranked by; those without points get -inf."""
    products = best_products(q, groups.centroid, groups.radius)
    return jnp.where(groups.size > 0, products, -jnp.inf)


def in_units(
    index: Clusters, q: Queries, scores: Float32[Array, "B K L"], tokens: int, least: int
) -> Float32[Array, "B K L"]:
    """Return the scores of clusters in the best units, -inf for the others.

    These are at least `least` units, and as many more, best first, as it takes to hold `tokens`.
    """
    assert index.coarse is not None
    assert index.tokens is not None
    units = relevance(index.coarse, q)
    nth = jnp.arange(units.shape[-1])
    this, other = units[..., :, None], units[..., None, :]
    better = (other > this) | ((other == this) & (nth < nth[:, None]))
    rank = jnp.sum(better, -1)
    held = jnp.sum(jnp.where(better, index.tokens[..., None, :], 0), -1)
    chosen = (rank < least) | (held < tokens)
    there = jnp.take_along_axis(chosen, index.coarse.of_point, axis=-1)
    return jnp.where(there, scores, -jnp.inf)
