"""Lets a policy choose for recorded heads, as if it decoded the text that they were recorded on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView
from jsparse.hooks import PrefillView, State
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.policy import Policy
from jsparse.selection import Selection

PAGE = 16


class RecordedHeads(NamedTuple):
    """Holds the keys of KV heads, and the last queries of each one's group, after RoPE."""

    keys: Float32[Array, "heads S H"]
    queries: Float32[Array, "heads W G H"]


Look = Callable[[Array, LayerCache, Selection, State], Any]
"""(the queries [1, N, H], the cache's layer, the selection, the state after it) -> arrays."""


def replay(
    policy: Policy,
    heads: RecordedHeads,
    steps: int,
    look: Look,
    *,
    tokens: Int32[Array, "S"] | None = None,
    constants: Mapping[str, Array] | None = None,
) -> Any:
    """Returns what `look` returns in each of the last `steps` steps, stacked.

    All heads belong to one layer of one row, and values are the keys. The policy reads all but the
    last `steps` tokens as a prompt of one chunk, and then takes in one token per step.

    Args:
        policy: the policy, whose hooks are called as in a session.
        heads: keys of whole pages, and the queries of at least `steps` + `policy.window` tokens.
        steps: the number of tokens that are taken in one by one.
        look: what is measured in each step.
        tokens: the ids of the text; None for a policy that does not look at them.
        constants: the constants of the model that the policy needs.

    Raises:
        ValueError: there are fewer queries.
    """
    (number, slots, dim), (window, group) = heads.keys.shape, heads.queries.shape[1:3]
    if window < steps + policy.window:
        raise ValueError(
            f"heads with {window} queries: must have at least {steps + policy.window}, those of "
            f"{steps} steps and of the window of {policy}"
        )
    spec = CacheSpec(1, 1, number * group, number, dim, PAGE, slots // PAGE, heads.keys.dtype)
    pool = heads.keys.reshape(-1, PAGE, dim)
    keys = heads.keys.swapaxes(0, 1)[None]  # [1, S, K, H]
    queries = heads.queries.swapaxes(0, 1).reshape(1, window, -1, dim)
    ids = jnp.zeros((1, slots), jnp.int32) if tokens is None else tokens[None]
    prompt = slots - steps

    def cache_of(length: Array | int, position: Array | int) -> StepView:
        lengths = jnp.full((1, number), length, jnp.int32)
        layer = LayerCache(pool, pool, lengths)
        cache = KVCache((layer,), jnp.full(1, position, jnp.int32), jnp.zeros(1, jnp.bool_))
        return StepView(cache, constants)

    def read(state: State) -> State:
        at = jnp.arange(prompt, dtype=jnp.int32)[None]
        whole, count = keys[:, :prompt], jnp.full(1, prompt, jnp.int32)
        first = window - steps - policy.window
        last_queries = queries[:, first : window - steps]
        seen = jnp.full(1, policy.window, jnp.int32)
        chunk = ids[:, :prompt], at, whole, whole, count
        view = PrefillView(*chunk, cache_of(prompt, 0), last_queries, seen, True)
        return policy.prefill(state, 0, view)

    def step(state: State, nth: Array) -> tuple[State, Any]:
        position = prompt + nth
        q = jax.lax.dynamic_index_in_dim(queries, window - steps + nth, 1, keepdims=False)
        new, token = (jax.lax.dynamic_slice_in_dim(x, position, 1, axis=1) for x in (keys, ids))
        cache = cache_of(position + 1, position)
        held, at = cache.layers[0], jnp.full((1, 1), position, jnp.int32)
        state = policy.append(state, 0, new, new, token, at, cache)
        chosen, _, state = policy.select(state, 0, q, cache)
        seen = look(q, held, chosen, state)
        if policy.stats(0) is not None:
            attend = token_sparse_decode if chosen.granularity == "token" else block_sparse_decode
            stats = attend(q, held, chosen, stats=policy.stats(0)).stats
            state = policy.update(state, 0, stats, cache)
        if policy.services.period:
            due, after = (
                (nth + 1) % policy.services.period == 0,
                cache_of(position + 1, position + 1),
            )
            state = jax.lax.cond(
                due, lambda s: policy.services.maintain(s, after)[0], lambda s: s, state
            )
        return state, seen

    return jax.lax.scan(step, read(policy.init(spec)), jnp.arange(steps, dtype=jnp.int32))[1]
