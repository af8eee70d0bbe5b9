"""DuoAttention keeps retrieval heads dense; the others attend to the first and the newest tokens.

Paper: "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (Xiao
et al.), arXiv:2410.10819.

Where we differ: all heads read the prompt densely, and tokens that a streaming head does not attend
to stay in the cache, unread. Gates come from the same files as LycheeDecode's, and
`jsparse train-gates` trains them for sparse heads that inherit a set, not for heads that see a
window.
"""

from jsparse.builder import builder
from jsparse.policies.combinators import retrieval_heads
from jsparse.policies.streaming import streaming
from jsparse.policy import Policy


@builder
def duo_attention(gates, sink: int = 64, recent: int = 256) -> Policy:
    """Attends to everything in retrieval heads and, in the others, to the first and last tokens.

    Args:
        gates: the retrieval heads, as a name that ships with jsparse, a file that
            `jsparse train-gates` wrote, which is not read again in the same process, or the mask
            [L, K] itself.
        sink: the number of first tokens that the other heads attend to.
        recent: the number of last tokens that they attend to.
    """
    window = streaming(sink=sink, recent=recent)
    return retrieval_heads(window, gates)
