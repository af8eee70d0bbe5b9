"""LycheeCluster attends to chunks that follow the text, found by clusters of their keys.

A chunk ends where a paragraph, a sentence or a clause does. Chunks whose mean keys point the same
way form a cluster, and a query reads the centroids of clusters to choose among them.

Paper: "LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking and
Hierarchical KV Indexing" (Li et al.), arXiv:2603.08453. It leaves the first two layers dense:
dense_layers(lychee_cluster(…), n=2).

Where we differ: clusters are ranked by q·μ (`rank="bound"` is the paper's q·μ + |q|·r, equation 2),
which finds more of the true top-k on SmolLM2. All centroids are scored; the paper's units of
clusters come before them with `levels=2`, and a unit's radius then takes in the clusters' own, so
that it bounds chunks. Chunks are taken one by one, best cluster first, until the budget is full,
so that a large cluster is not left out whole. The query heads of a group share their chunks, ranked
by the greatest score among them. While decoding, every `cluster_size`-th chunk founds a cluster, as
in the prompt; the paper lets all of them join, so that the clusters of a short prompt would come to
hold the whole of a long answer. Tokens are cut into chunks every `period` steps, by the same rule
as the prompt's, and wait in a buffer that is attended to. A row whose chunks are so short that the
index would overflow cuts the rest at the greatest length. Centroids have K's type: in bfloat16 the
centroid of some hundred chunks hardly moves when another joins.
"""

from typing import Literal, get_args

from jsparse.builder import builder
from jsparse.hyper_parameters import flag, one_of, whole_number
from jsparse.policies.clusters.engine import (
    CLASSES,
    Chunking,
    Settings,
    chunk_policy,
    cluster_index,
    require_budget,
    require_chunks,
)
from jsparse.policies.clusters.index import CentroidPooling, Form
from jsparse.policy import Policy

Rank = Literal["centroid", "bound"]


@builder
def lychee_cluster(
    budget: int = 1024,
    chunks: Chunking | None = None,
    rank: Rank = "centroid",
    levels: Literal[1, 2] = 1,
    cluster_size: int = 2,
    pooling: CentroidPooling = "mean",
    normalise: bool = True,
    sink: int = 16,
    recent: int = 112,
    lengths: tuple[int, int] = (8, 16),
    period: int = 16,
) -> Policy:
    """Attends to at most `budget` tokens: sinks, the newest, and the chunks of the best clusters.

    Rows of no more than `budget` tokens are dense.

    Args:
        budget: the most tokens that a KV head attends to.
        chunks: "structure" ends chunks at boundaries of the text, which it knows from the model's
            tokenizer; "fixed" ends all of them at their greatest length. None is "structure" where
            the model has a tokenizer, else "fixed", and the log says so.
        rank: "centroid" ranks clusters by q·μ, "bound" by q·μ + |q|·r, the most that q·v can be
            for the representative v of a chunk.
        levels: 2 first chooses units of clusters, which hold 4 times the budget, at least 8, and
            reads the centroids of no others.
        cluster_size: chunks per cluster, on average.
        pooling: "mean" represents a chunk by the mean of its keys, "max" by their greatest value
            in every channel.
        normalise: whether representatives, and so centroids, are scaled to length 1.
        sink: the number of first tokens that are always attended to.
        recent: the newest tokens that are always attended to, at the least; they are in no chunk.
        lengths: the fewest and the most tokens of a chunk.
        period: new tokens of a row between two times that it cuts chunks.
    """
    one_of("rank", rank, get_args(Rank))
    one_of("pooling", pooling, get_args(CentroidPooling))
    one_of("levels", levels, (1, 2))
    flag("normalise", normalise)
    whole_number("budget", budget, 1)
    whole_number("cluster_size", cluster_size, 1)
    whole_number("sink", sink, 0)
    whole_number("period", period, 1)
    shortest, longest = require_chunks(chunks, lengths, recent)
    form = Form(
        longest=longest,
        cluster_size=cluster_size,
        pooling=pooling,
        normalise=normalise,
        radii=rank == "bound",
        units=levels == 2,
    )
    index, classes = cluster_index(form), CLASSES[chunks]
    settings = Settings(budget, shortest, longest, classes, index, sink, recent, period)
    require_budget(settings)
    return chunk_policy(settings)
