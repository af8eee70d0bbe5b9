"""H2O keeps the newest tokens and the heavy hitters, those with the most attention so far.

Paper: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang
et al.), arXiv:2306.14048.

Where we differ: the sums start with the prompt's last queries only, since prefill uses flash
attention, which forms no sums over queries; the query heads of a group share the slots of their KV
head, so the sums start with the mean over them, and a decode step adds the attention of their mean
query; and tokens are dropped every `period` steps (the paper: every step).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse.builder import builder
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.window_attention import window_attention
from jsparse.policies.eviction.budgets import CountBounds, competing_room, uniform
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import LayerView, Settings, Tracking
from jsparse.policy import Policy


@builder
def h2o(budget: int = 1024, window: int = 32, period: int = 128) -> Policy:
    """Keeps `budget` slots per KV head: half of them heavy hitters, half of them the newest.

    Args:
        budget: the number of slots that a KV head keeps at each compression.
        window: the number of last prompt queries that the sums start with.
        period: the number of new tokens between compressions.
    """
    whole_number("budget", budget, 2)
    whole_number("window", window, 1)
    whole_number("period", period, 1)
    recent = budget // 2
    room = competing_room(budget, recent)
    settings = Settings(
        accumulated,
        uniform(CountBounds(0, room, room)),
        kept=room,
        max_length=lambda prompt_tokens, new_tokens: min(
            prompt_tokens + new_tokens, budget + period
        ),
        window=window,
        recent=recent,
        period=period,
        tracking=SUMS,
    )
    return evicting(settings)


def accumulated(view: LayerView) -> Float32[Array, "B K S"]:
    """Scores slots by the attention that they have received so far."""
    assert view.tracked is not None
    return view.tracked


def _begin(view: LayerView) -> Float32[Array, "B K S"]:
    """Sums the attention of the prompt's last queries to every token up to their own."""
    kv = view.kv
    there = jnp.arange(kv.capacity, dtype=jnp.int32) < kv.lengths[..., None]
    queries = jnp.clip(view.positions, 1, view.ring.shape[1])[:, None, None]
    return queries * window_attention(view.ring, view.positions, kv, there, over="held")


SUMS = Tracking(_begin, lambda sums, shares, lengths, positions: sums + shares)
