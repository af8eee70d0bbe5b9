"""DuoAttention keeps retrieval heads dense; other heads attend to the first and newest tokens.

Paper: "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (Xiao
et al.), arXiv:2410.10819.

Where we differ: prefill is dense for all heads, and tokens that a streaming head does not attend to
stay in the cache, unread. `jsparse train-gates --family direct --sets streaming --match hidden`
trains gates as the paper does, except that all heads of layer 0 are retrieval heads.
"""

from jsparse.builder import builder
from jsparse.policies.combinators import retrieval_heads
from jsparse.policies.streaming import streaming
from jsparse.policy import Policy


@builder
def duo_attention(gates, sink: int = 64, recent: int = 256) -> Policy:
    """Attends to everything in retrieval heads, and to the first and last tokens in the others.

    Args:
        gates: the retrieval heads: a name that ships with jsparse, a file written by `jsparse
            train-gates` (read once per process), or the mask [L, K] itself.
        sink: the number of first tokens that the other heads attend to.
        recent: the number of last tokens that they attend to.
    """
    window = streaming(sink=sink, recent=recent)
    return retrieval_heads(window, gates)
