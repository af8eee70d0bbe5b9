"""Makes room for the tokens that heads will hold while they decode, and checks it.

Policies that evict give the maximum number of tokens per head (`Eviction.max_length`) and rework
the cache after the prompt, so that it need not hold more.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jsparse.cache import CacheSpec, KVCache, ReadOnly, step_view, without_borrowed
from jsparse.hooks import State
from jsparse.policy import Eviction, Policy
from jsparse.runtime import capacity
from jsparse.runtime.compilation import inlined, program
from jsparse.runtime.spread_programs import SHARDED


def require_pages(
    policy: Policy, spec: CacheSpec, prompts: Sequence[int], limits: Sequence[int]
) -> None:
    """Raises ValueError if a shared pool is too small for the policy's maximum tokens per head.

    `prompts` and `limits` are the prompt and new tokens of each row; every row takes pages until
    the last one ends.
    """
    if policy.eviction is None or policy.eviction.max_length is None or spec.pool_pages is None:
        return
    slots = _wanted(policy, prompts, [max(limits)] * spec.batch)
    pages = 1 + spec.num_kv_heads * sum(-(-wanted // spec.page_size) for wanted in slots)
    if spec.pool_pages < pages:
        raise ValueError(
            f"pool_pages={spec.pool_pages}: must be at least {pages}, the scratch page and the "
            f"pages of heads of {slots} tokens, the maximum of {policy}"
        )


def after_prompt(
    policy: Policy,
    spec: CacheSpec,
    cache: KVCache,
    state: State,
    read_only: ReadOnly,
    prompts: Sequence[int],
    limits: Sequence[int],
    mesh: Mesh | None = None,
    *,
    within: bool = False,
) -> tuple[KVCache, State]:
    """Runs the policy's eviction after the prompts, once, before the first step.

    `prompts` and `limits` are as in `require_pages`; `mesh` has the devices that the model is
    spread over. With `within`, it becomes part of the calling program.

    Raises:
        ValueError: it leaves heads less room than `max_length`.
    """
    if not _evicts_prompts(policy):
        return cache, state
    run = inlined(evict) if within else evict.on(mesh)
    return run(policy, cache, state, read_only, _slots(policy, spec, prompts, limits))


def expect_eviction(
    policy: Policy,
    spec: CacheSpec,
    cache: Any,
    state: Any,
    read_only: ReadOnly,
    prompts: Sequence[int],
    limits: Sequence[int],
    mesh: Mesh | None = None,
) -> tuple[Any, Any]:
    """Starts compiling `after_prompt` for these arguments, or shapes, and returns its shapes."""
    if not _evicts_prompts(policy):
        return cache, state
    run, slots = evict.on(mesh), _slots(policy, spec, prompts, limits)
    run.ahead(policy, cache, state, read_only, slots)
    return run.eval_shape(policy, cache, state, read_only, slots)


@program(static_argnames=("policy", "slots"), sharded=("cache", "state"), out=SHARDED)
def evict(
    policy: Policy, cache: KVCache, state: State, read_only: ReadOnly, slots: int
) -> tuple[KVCache, State]:
    """Runs the policy's eviction, which must leave room for `slots` tokens per head.

    Raises:
        ValueError: it leaves less room.
    """
    rework = (policy.eviction or Eviction()).after_prompt
    if rework is None:
        return cache, state
    state, cache = rework(state, step_view(cache, read_only), slots)
    left = min(layer.capacity for layer in cache.layers)
    if left < slots:
        raise ValueError(
            f"policy={policy}: after_prompt left room for {left} tokens per head: must be at "
            f"least {slots}, its `max_length`"
        )
    return without_borrowed(cache), state


def _evicts_prompts(policy: Policy) -> bool:
    return policy.eviction is not None and policy.eviction.after_prompt is not None


def _slots(policy: Policy, spec: CacheSpec, prompts: Sequence[int], limits: Sequence[int]) -> int:
    """Returns the slots per head that the eviction must leave."""
    return capacity.slots_left(max(_wanted(policy, prompts, limits)), spec)


def _wanted(policy: Policy, prompts: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Returns the maximum slots per head of each row."""
    return [max_length(policy)(prompt, new) for prompt, new in zip(prompts, limits, strict=True)]


def max_length(policy: Policy) -> Callable[[int, int], int]:
    """Returns the policy's `max_length`, or prompt + new."""
    return (policy.eviction and policy.eviction.max_length) or operator.add
