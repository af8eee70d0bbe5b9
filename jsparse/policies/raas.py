"""RaaS drops the tokens that have been unused for the longest time, while a model reasons.

Paper: "Efficient Long-Decoding Inference with Reasoning-Aware Attention Sparsity" (Hu et al.),
arXiv:2502.11147.

Where we differ: the budget counts only new tokens, since the prompt is never dropped; tokens are
stamped one by one (the paper stamps pages), by the attention of the group's mean query, and dropped
every `period` steps.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse.builder import builder
from jsparse.hyper_parameters import fraction, whole_number
from jsparse.policies.eviction.budgets import CountFn, competing_room
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import LayerView, Settings, Tracking
from jsparse.policy import Policy

PROMPT = 2.0**30  # the stamp of the prompt's tokens, above every position


@builder
def raas(budget: int = 1024, threshold: float = 1e-4, window: int = 1, period: int = 128) -> Policy:
    """Keeps the prompt, and the `budget` most recently used new tokens.

    Args:
        budget: the number of new tokens that a KV head keeps at each compression.
        threshold: the minimum share of the attention with which a token counts as used in a step.
        window: the number of newest tokens that are kept regardless of use.
        period: the number of new tokens between compressions.
    """
    whole_number("window", window, 1)
    room = competing_room(budget, window)
    fraction("threshold", threshold)
    whole_number("period", period, 1)

    def stamped(stamps, shares, lengths, positions):
        slots = jnp.arange(stamps.shape[-1], dtype=jnp.int32)
        used = (shares >= threshold) | (slots == lengths[..., None] - 1)
        now = positions[:, None, None].astype(stamps.dtype)
        return jnp.where(used & (stamps < PROMPT), now, stamps)

    def max_length(prompt_tokens: int, new_tokens: int) -> int:
        return prompt_tokens + min(new_tokens, budget + period)

    settings = Settings(
        last_used,
        _prompt_and(room),
        max_length=max_length,
        window=window,
        period=period,
        tracking=Tracking(_begin, stamped),
    )
    return evicting(settings)


def last_used(view: LayerView) -> Float32[Array, "B K S"]:
    """Scores slots by their stamps; the prompt's are the highest."""
    assert view.tracked is not None
    return view.tracked


def _begin(view: LayerView) -> Float32[Array, "B K S"]:
    slots = jnp.arange(view.kv.capacity, dtype=jnp.int32)
    there = slots < view.kv.lengths[..., None]
    return jnp.where(there, jnp.float32(PROMPT), 0.0)


def _prompt_and(room: int) -> CountFn:
    def count(scores, competing, temperatures, attention):
        of_prompt = jnp.sum(competing & (scores >= PROMPT), -1, dtype=jnp.int32)
        return of_prompt + room, temperatures

    return count
