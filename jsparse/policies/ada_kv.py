"""Ada-KV lets the KV heads of a layer compete for the slots that SnapKV gives to each of them.

Paper: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference" (Feng et al.), arXiv:2407.11550.

Where we differ: a head's share has a limit, `cap`, so that a row's memory is known beforehand; and
as in `snapkv`, the query heads of a group choose together.
"""

from jsparse.builder import builder
from jsparse.hyper_parameters import whole_number
from jsparse.policies.eviction.budgets import layer_budget
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import Settings
from jsparse.policies.snapkv import Pooling, pooled_attention
from jsparse.policy import Policy


@builder
def ada_kv(
    budget: int = 1024,
    window: int = 32,
    pool: int = 7,
    pooling: Pooling = "max",
    floor: float = 0.2,
    cap: float = 4,
) -> Policy:
    """Keeps a layer's best `budget` slots per KV head, counted over all heads, and all new ones.

    Args:
        budget: the average number of prompt slots kept per KV head, including the window's.
        window: as in `snapkv`.
        pool: as in `snapkv`.
        pooling: as in `snapkv`.
        floor: the part of the budget that is guaranteed to every head: of the slots besides the
            window's a head gets (1 - floor) times its share of the layer's best, and floor times
            the mean.
        cap: the maximum slots of a head, as a multiple of the budget.
    """
    whole_number("window", window, 1)
    own = layer_budget(budget, window, floor, cap)
    settings = Settings(pooled_attention(pool, pooling), **own._asdict(), window=window)
    return evicting(settings)
