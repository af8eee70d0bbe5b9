"""LycheeCluster attends to chunks of the text, found through clusters of their keys.

A chunk ends at the end of a paragraph, a sentence or a clause. Chunks with mean keys of similar
direction form a cluster, and a query reads the clusters' centroids to choose among them.

Paper: "LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking and
Hierarchical KV Indexing" (Li et al.), arXiv:2603.08453. It leaves the first two layers dense:
dense_layers(lychee_cluster(…), n=2).

Where we differ:
- Clusters are ranked by q·μ (`rank="bound"` is the paper's q·μ + |q|·r, equation 2), which finds
  more of the true top-k on SmolLM2.
- All centroids are scored. With `levels=2` the paper's units of clusters are scored first; a unit's
  radius includes those of its clusters, so that it bounds chunks.
- Chunks are taken one by one, best cluster first, until the budget is full, so that a large cluster
  is not skipped as a whole. The query heads of a group share their chunks, ranked by the highest
  score among them.
- While decoding, every `cluster_size`-th chunk founds a cluster, as in the prompt. In the paper all
  of them join existing ones, so that the clusters of a short prompt would absorb a whole long
  output.
- Tokens are cut into chunks every `period` steps, by the same rule as the prompt's; until then they
  are in a buffer that is attended to. If a row's chunks are so short that the index would overflow,
  the rest is cut at the maximum length.
- Centroids have K's type: in bfloat16 the centroid of several hundred chunks hardly moves when
  another joins.
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

    Rows of at most `budget` tokens are dense.

    Args:
        budget: the maximum number of tokens that a KV head attends to.
        chunks: "structure" ends chunks at boundaries of the text, found with the model's tokenizer;
            "fixed" gives all chunks the maximum length. None: "structure" if the model has a
            tokenizer, else "fixed" with a warning in the log.
        rank: "centroid" ranks clusters by q·μ, "bound" by q·μ + |q|·r, the maximum of q·v over
            representatives v of its chunks.
        levels: 2 first chooses units of clusters that hold 4 times the budget, at least 8 units,
            and reads only their centroids.
        cluster_size: chunks per cluster, on average.
        pooling: a chunk's representative: "mean" of its keys, or their "max" in every channel.
        normalise: whether representatives, and so centroids, are scaled to length 1.
        sink: the number of first tokens that are always attended to.
        recent: the minimum number of newest tokens that are in no chunk; these are always attended
            to.
        lengths: the minimum and maximum tokens of a chunk.
        period: the number of new tokens of a row after which they are cut into chunks.
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
