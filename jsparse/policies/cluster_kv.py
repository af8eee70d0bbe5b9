"""ClusterKV attends to single tokens, found through clusters of their keys.

Paper: "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression" (Liu et
al.), arXiv:2412.03213. It leaves the first two layers dense: dense_layers(cluster_kv(…), n=2).

Where we differ: this is LycheeCluster's engine with chunks of one token. New tokens join the
existing clusters, and every 80th founds one; the paper clusters each 320 new tokens separately.
Tokens are assigned to centroids by direction. If a cluster no longer fits in the budget, its oldest
tokens fill the rest. The query heads of a group share their tokens.
"""

from jsparse.builder import builder
from jsparse.hyper_parameters import whole_number
from jsparse.policies.clusters.engine import Settings, chunk_policy, cluster_index, require_budget
from jsparse.policies.clusters.index import Form
from jsparse.policy import Policy


@builder
def cluster_kv(
    budget: int = 1024,
    cluster_size: int = 80,
    sink: int = 16,
    recent: int = 112,
    period: int = 16,
) -> Policy:
    """Attends to at most `budget` tokens: sinks, the newest, and those of the best clusters.

    Rows of at most `budget` tokens are dense.

    Args:
        budget: the maximum number of tokens that a KV head attends to.
        cluster_size: tokens per cluster, on average.
        sink: the number of first tokens that are always attended to.
        recent: the minimum number of newest tokens that are in no cluster; these are always
            attended to.
        period: the number of new tokens of a row after which they join clusters.
    """
    whole_number("budget", budget, 1)
    whole_number("cluster_size", cluster_size, 1)
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 1)
    whole_number("period", period, 1)
    form = Form(longest=1, cluster_size=cluster_size, normalise=False)
    settings = Settings(budget, 1, 1, None, cluster_index(form), sink, recent, period)
    require_budget(settings)
    return chunk_policy(settings)
