"""SnapKV drops, right after the prompt, the tokens with the least attention from its last queries.

Paper: "SnapKV: LLM Knows What You are Looking for Before Generation" (Li et al.), arXiv:2404.14469.

A query's weights are its softmax over all keys up to its own, as in the paper.

Where we differ: the query heads of a group share the slots of their KV head; a slot's weight is the
mean over them (the authors' code repeats K and V, and each query head keeps its own slots). By
default the last 8 queries choose: of a longer window, such as the paper's, too little belongs to a
question of a few tokens (docs/results/eviction.md).
"""

from typing import Literal, get_args

from jsparse.builder import builder
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.pallas_kernels.window_attention import NormaliseOver, window_attention
from jsparse.policies.eviction.budgets import CountBounds, competing_room, uniform
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import LayerView, ScoreFn, Settings
from jsparse.policies.eviction.window import pooled
from jsparse.policy import Policy

Pooling = Literal["mean", "max"]
POOL, POOLING = 5, "mean"


@builder
def snapkv(
    budget: int = 1024, window: int = 8, pool: int = POOL, pooling: Pooling = POOLING
) -> Policy:
    """Keeps the prompt's last `window` tokens, the ones they attend to most, and all new tokens.

    Args:
        budget: the number of prompt slots that a KV head keeps, including the window's.
        window: the number of last queries that choose.
        pool: the number of neighbours over which weights are smoothed; odd; 1: no smoothing.
        pooling: the kind of smoothing, "mean" or "max".
    """
    whole_number("window", window, 1)
    room = competing_room(budget, window)
    settings = Settings(
        pooled_attention(pool, pooling),
        uniform(CountBounds(0, room, room)),
        kept=room,
        max_length=lambda prompt_tokens, new_tokens: min(prompt_tokens, budget) + new_tokens,
        window=window,
    )
    return evicting(settings)


def pooled_attention(pool: int, pooling: Pooling, over: NormaliseOver = "held") -> ScoreFn:
    """Scores slots by the window's attention, smoothed over neighbours.

    `over`: the slots over which a query's weights sum to 1; see `window_attention`.
    """
    whole_number("pool", pool, 1)
    if pool % 2 == 0:
        raise ValueError(f"pool={pool}: must be odd, to be centred on a slot")
    one_of("pooling", pooling, get_args(Pooling))

    def score(view: LayerView):
        found = window_attention(view.ring, view.positions, view.kv, view.competing, over=over)
        return pooled(found, view.competing, pool, pooling)

    return score
