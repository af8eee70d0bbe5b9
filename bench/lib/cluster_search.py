"""Builds the search for clusters alone, flat and by units, over indices made without a prompt.

Chunks of TOKENS tokens, two to a cluster, lie around DIRECTIONS directions. Units are made of the
clusters as the policy makes them. The contenders:

    flat        centroid_scores over all centroids
    levels      the units' scores, their choice, and the centroids of those that were chosen
    chunks      what follows either: the scores of chunks, and threshold_select over all of them
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bench.lib.kernel_cases import HEAD_DIM, ITEM_BYTES, KV_HEADS, ROTATED_BYTES
from bench.lib.kernel_programs import Job, in_turn
from jsparse.pallas_kernels.point_groups import Groups, unit_length
from jsparse.pallas_kernels.threshold_select import Budget, threshold_select
from jsparse.policies.clusters.engine import WIDER
from jsparse.policies.clusters.index import Clusters, Form, max_units, units_of
from jsparse.policies.clusters.search import best_units, cluster_scores, unit_scores

TOKENS, DIRECTIONS, SCATTER = 13, 256, 0.5
CALLS, GROUP = 16, 4
FORM = Form(longest=16, cluster_size=2, units=True)


def clusters_of(context: int) -> int:
    """Returns the number of clusters of a context."""
    return context // (TOKENS * FORM.cluster_size)


@partial(jax.jit, static_argnums=(1, 2))
def made(seed: int, batch: int, context: int) -> Clusters:
    """Returns an index whose clusters lie around directions."""
    heads, number = (batch, KV_HEADS), clusters_of(context)
    keys = jax.random.split(jax.random.key(seed), 4)
    around = jax.random.normal(keys[0], (DIRECTIONS, HEAD_DIM))
    near = around[jax.random.randint(keys[1], (*heads, number), 0, DIRECTIONS)]
    near += SCATTER * jax.random.normal(keys[2], near.shape)
    chunks = jnp.arange(FORM.cluster_size * number, dtype=jnp.int32) // FORM.cluster_size
    fine = Groups(
        unit_length(near).astype(jnp.bfloat16),
        jnp.full((*heads, number), FORM.cluster_size, jnp.int32),
        jnp.broadcast_to(jax.random.permutation(keys[3], chunks), (*heads, chunks.size)),
        None,
    )
    coarse = units_of(fine, jnp.full(batch, number, jnp.int32), jnp.bfloat16, FORM)
    return Clusters(fine, coarse, coarse.size * FORM.cluster_size * TOKENS)


def read_bytes(index: Clusters, q: Array, budget: int) -> dict[str, int]:
    """Returns the bytes that each contender has to read for a query."""
    assert index.coarse is not None
    assert index.tokens is not None
    row = HEAD_DIM * ITEM_BYTES
    units = best_units(unit_scores(index.coarse, q), index.tokens, WIDER * budget)
    scored = int(jnp.sum(jnp.where(units, index.coarse.size, 0)))
    clusters, chunks = index.fine.size.size, index.fine.of_point.size
    return {
        "flat": clusters * row,
        "levels": scored * row + units.size * row + 4 * clusters,
        "chunks": chunks * (4 + 4 + 1),  # its cluster, its score and its size
    }


def search_job(batch: int, context: int, budget: int) -> tuple[Job, dict[str, int]]:
    """Returns the job of the contenders, whose bytes are the flat search's, and what each reads."""
    first = made(0, batch, context)
    size = first.fine.centroid.nbytes
    copies = min(max(-(-ROTATED_BYTES // size), 2), CALLS)
    queries = [
        jax.random.normal(key, (batch, KV_HEADS * GROUP, HEAD_DIM), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(1), CALLS)
    ]
    number = jnp.full((batch, KV_HEADS), clusters_of(context), jnp.int32)
    sizes = jnp.full((batch, 1, first.fine.of_point.shape[2]), TOKENS, jnp.uint8)
    room = jnp.full((batch, KV_HEADS), budget, jnp.int32)

    def build() -> tuple[None, list[Any]]:
        indices = [jax.tree.map(jnp.copy, first) for _ in range(copies)]
        return None, [(indices[nth % copies], q) for nth, q in enumerate(queries)]

    def flat(_: None, one: Any) -> Array:
        index, q = one
        return cluster_scores(Clusters(index.fine, None, None), q, number, 0)

    def levels(_: None, one: Any) -> Array:
        return cluster_scores(*one, number, WIDER * budget)

    def chunks(_: None, one: Any) -> Array:
        index, q = one
        # scores that cost a launch of their own would hide what is timed
        scores = jnp.resize(q.reshape(batch, KV_HEADS, -1), index.fine.size.shape)
        scores = jnp.take_along_axis(scores.astype(jnp.float32), index.fine.of_point, axis=-1)
        return threshold_select(
            scores[:, :, None], Budget(room, sizes), capacity=budget // 8, weights="raw"
        ).ids

    ops = {"flat": flat, "levels": levels, "chunks": chunks}
    contenders = {name: in_turn(op) for name, op in ops.items()}
    assert first.coarse is not None
    assert first.coarse.size.shape[2] == max_units(clusters_of(context))
    job = Job(f"{batch} x {context}", size, build, contenders)
    return job, read_bytes(first, queries[0], budget)
