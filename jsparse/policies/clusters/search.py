"""Scores clusters for a query: all of them, or top-down, by units (Algorithm 1, lines 8 to 13).

Top-down, the best units are chosen first, and only their centroids are read. With radii the score
of a unit bounds those of its clusters (equation 2).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.point_groups import Groups
from jsparse.policies.clusters.index import Clusters, Form, num_clusters
from jsparse.shapes import Lengths, Queries

MIN_UNITS = 8  # the minimum number of chosen units


def chunk_scores(
    form: Form, index: Clusters, q: Queries, count: Lengths, tokens: int
) -> Float32[Array, "B K C"]:
    """Returns the scores of chunks, each that of its cluster.

    Args:
        form: the parameters of the clusters.
        index: one layer's index.
        q: the queries of one step.
        count: the number of chunks of each head.
        tokens: as in `cluster_scores`.
    """
    scores = cluster_scores(index, q, num_clusters(count, form), tokens)
    return jnp.take_along_axis(scores, index.fine.of_point, axis=-1, mode="clip")


def cluster_scores(
    index: Clusters, q: Queries, number: Lengths, tokens: int
) -> Float32[Array, "B K L"]:
    """Returns the scores of clusters for a query, -inf for skipped clusters.

    Args:
        index: one layer's index; without units all clusters are scored.
        q: the queries of one step.
        number: the number of clusters of each head.
        tokens: the minimum number of tokens in the chosen units together.
    """
    fine, coarse = index.fine, index.coarse
    if coarse is None or index.tokens is None:
        return centroid_scores(q, fine.centroid, number, fine.radius)
    chosen = best_units(unit_scores(coarse, q), index.tokens, tokens)
    return centroid_scores(q, fine.centroid, number, fine.radius, coarse.of_point, chosen)


def unit_scores(coarse: Groups, q: Queries) -> Float32[Array, "B K U"]:
    """Returns the scores of units for a query; with radii, bounds on those of their clusters."""
    size = coarse.size
    number = jnp.full(size.shape[:2], size.shape[2], jnp.int32)
    scores = centroid_scores(q, coarse.centroid, number, coarse.radius)
    return jnp.where(size > 0, scores, -jnp.inf)


def best_units(
    scores: Float32[Array, "B K U"], tokens_in: Int32[Array, "B K U"], tokens: int
) -> Bool[Array, "B K U"]:
    """Marks the units with the highest scores: MIN_UNITS, and more until they hold `tokens`."""
    nth = jnp.arange(scores.shape[-1])
    this, other = scores[..., :, None], scores[..., None, :]
    better = (other > this) | ((other == this) & (nth < nth[:, None]))
    rank = jnp.sum(better, -1)
    before = jnp.sum(jnp.where(better, tokens_in[..., None, :], 0), -1)
    return (rank < MIN_UNITS) | (before < tokens)
