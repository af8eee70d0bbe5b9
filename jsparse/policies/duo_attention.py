"""DuoAttention keeps retrieval heads dense; other heads attend to the first and newest tokens.

Paper: "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (Xiao
et al.), arXiv:2410.10819.

Where we differ: prefill is dense for all heads, and tokens that a streaming head does not attend to
stay in the cache, unread.

`jsparse train-gates --family direct --sets streaming --match hidden --rate 0.02 --steps 2000
--asked 10` trains gates as the paper does: a number α per KV head, from 1 and clipped to [0, 1],
mixes full and streaming attention; the loss is the squared difference of the last hidden states
plus an L1 penalty of 0.05; the highest α are retrieval heads. Where that differs:
- All heads of layer 0 are retrieval heads, and count among the `--target`.
- Only the tokens after the context mix both attentions; the context's prefill is dense, as here.
- The difference is a share of the states' variance, and the penalty is the mean of α; the paper
  has the squared difference itself and the sum of α. So 0.05 does not weigh the same
  (`--penalty-start`).
- Only the words of the keys count, in the authors' code also the questions. Streaming heads attend
  to 64 sinks, in the authors' code to 128.
- If more α than `--target` are 1, those of the first layers are chosen, in the authors' code random
  ones.
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
