"""DuoAttention: retrieval heads attend to everything, the others to the first few tokens and the
newest ones.

Paper: "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (Xiao
    et al.),
arXiv:2410.10819. Where we differ: the prompt is read densely by all heads, and what a streaming
head does not attend to stays in the cache, unread. Gates are read from the files that
LycheeDecode's are read from, and `jsparse train-gates` trains them for sparse heads that inherit a
set, not for such that see a window.
"""

from dataclasses import replace

from jaxtyping import Array

from jsparse.cache import CacheSpec, KVCache
from jsparse.policies import head_gates
from jsparse.policies.streaming import streaming
from jsparse.policy import Policy, State, builder


@builder
def duo_attention(gates, sink: int = 64, recent: int = 256) -> Policy:
    """Retrieval heads are dense; the others attend to the first `sink` and the last `recent`
    tokens.

    Args:
        gates: the retrieval heads: a name that ships with jsparse, a file of `jsparse train-gates`,
            which is not read again in the same process, or the mask [L, K] itself.
        sink: how many of the first tokens streaming heads attend to.
        recent: how many of the last.
    """
    retrieval = head_gates.retrieval_heads(gates)
    window = streaming(sink=sink, recent=recent)

    def init(spec: CacheSpec) -> State:
        head_gates.require_fit(retrieval, gates, spec)
        return window.init(spec)

    def select(state: State, layer: int, q: Array, cache: KVCache):
        chosen, summary, state = window.select(state, layer, q, cache)
        return replace(chosen, dense=head_gates.of_rows(retrieval[layer], len(q))), summary, state

    return window._replace(select=select, init=init, dense_at={"sink": 0, "recent": 2**30})
