"""Scores clusters for a query: all of them, or top-down, by units (Algorithm 1, lines 8 to 13).

Top-down, the best units are chosen first, and of the others no centroid is read. With radii the
score of a unit bounds those of its clusters (equation 2), which shows whether the others could hold
a better one.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.point_groups import Groups
from jsparse.policies.clusters.index import Clusters, Form, num_clusters
from jsparse.shapes import Lengths, Queries

MIN_UNITS = 8  # the least number that are chosen
PRODUCT_ERROR = 2.0**-14  # bounds the error of a product of vectors of length 1


def chunk_scores(
    form: Form,
    index: Clusters,
    q: Queries,
    count: Lengths,
    tokens: int,
    worst: Callable[[Float32[Array, "B K C"]], Float32[Array, "B K"]] | None = None,
) -> Float32[Array, "B K C"]:
    """Returns the scores of chunks, each that of its cluster.

    Args:
        form: how chunks are clustered.
        index: one layer's.
        q: the queries of one step.
        count: the number of chunks of each head.
        tokens: as in `cluster_scores`.
        worst: likewise, but of the scores of chunks.
    """

    def of_chunks(scores: Float32[Array, "B K L"]) -> Float32[Array, "B K C"]:
        return jnp.take_along_axis(scores, index.fine.of_point, axis=-1, mode="clip")

    least = None if worst is None else lambda scores: worst(of_chunks(scores))
    return of_chunks(cluster_scores(index, q, num_clusters(count, form), tokens, least))


def cluster_scores(
    index: Clusters,
    q: Queries,
    number: Lengths,
    tokens: int,
    worst: Callable[[Float32[Array, "B K L"]], Float32[Array, "B K"]] | None = None,
) -> Float32[Array, "B K L"]:
    """Returns the scores of clusters for a query, -inf for clusters that are not looked at.

    Args:
        index: one layer's; without units all clusters are scored.
        q: the queries of one step.
        number: the number of clusters of each head.
        tokens: the tokens that the units looked into hold together, at least.
        worst: the least score that matters, by the scores found so far. Units that may reach it
            are looked into as well, so that every cluster that does has its score.
    """
    fine, coarse = index.fine, index.coarse
    if coarse is None or index.tokens is None:
        return scores_of(fine, q, number)

    def scores_in(units: Bool[Array, "B K U"]) -> Float32[Array, "B K L"]:
        return scores_of(fine, q, number, coarse.of_point, units)

    units = unit_scores(coarse, q)
    first = best_units(units, index.tokens, tokens)
    scores = scores_in(first)
    if worst is None:
        return scores
    more = units_that_reach(units, coarse, q, worst(scores))
    return jnp.maximum(scores, scores_in(more & ~first))


def scores_of(
    groups: Groups,
    q: Queries,
    number: Lengths,
    unit: Int32[Array, "B K L"] | None = None,
    chosen: Bool[Array, "B K U"] | None = None,
) -> Float32[Array, "B K L"]:
    """Returns the scores of groups for a query, as `centroid_scores` does."""
    scale, middle = groups.scale, groups.middle
    return centroid_scores(q, groups.centroid, number, groups.radius, unit, chosen, scale, middle)


def unit_scores(coarse: Groups, q: Queries) -> Float32[Array, "B K U"]:
    """Returns the scores of units for a query; with radii, bounds on those of their clusters."""
    size = coarse.size
    number = jnp.full(size.shape[:2], size.shape[2], jnp.int32)
    scores = scores_of(coarse, q, number)
    return jnp.where(size > 0, scores, -jnp.inf)


def best_units(
    scores: Float32[Array, "B K U"], held: Int32[Array, "B K U"], tokens: int
) -> Bool[Array, "B K U"]:
    """Marks the units of the greatest scores: MIN_UNITS, and more until they hold `tokens`."""
    nth = jnp.arange(scores.shape[-1])
    this, other = scores[..., :, None], scores[..., None, :]
    better = (other > this) | ((other == this) & (nth < nth[:, None]))
    rank = jnp.sum(better, -1)
    before = jnp.sum(jnp.where(better, held[..., None, :], 0), -1)
    return (rank < MIN_UNITS) | (before < tokens)


def units_that_reach(
    scores: Float32[Array, "B K U"], coarse: Groups, q: Queries, minimum: Float32[Array, "B K"]
) -> Bool[Array, "B K U"]:
    """Marks the units of which a cluster may score `minimum` or more, by their own scores.

    They have radii. By the triangle inequality no cluster of another unit scores as much, nor does
    a product that was rounded up.
    """
    assert coarse.radius is not None
    q = q.astype(jnp.float32).reshape(*minimum.shape, -1, q.shape[-1])
    longest = jnp.max(jnp.linalg.norm(q, axis=-1), axis=-1, keepdims=True)
    farthest = jnp.linalg.norm(coarse.centroid.astype(jnp.float32), axis=-1) + coarse.radius
    return scores + PRODUCT_ERROR * longest * farthest >= minimum[..., None]
