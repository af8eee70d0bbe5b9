"""Runs prompts through the model a second time, for methods that score tokens by it.

The tokens follow the whole prompt, one chunk at a time, and attend to it and to their chunk. The
cache does not change: only the policy sees their queries and keys (`Eviction.reread`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jsparse.cache import NOTHING, KVCache, ReadOnly, as_held, step_view
from jsparse.hooks import RereadView, State
from jsparse.models.transformer import Decoder, Weights, hidden_states
from jsparse.policy import Policy, kept
from jsparse.runtime.chunk_attention import attend_chunk
from jsparse.runtime.compilation import inlined, program
from jsparse.runtime.spread_programs import SHARDED
from jsparse.shapes import Tokens


def reread_prompts(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens | np.ndarray,
    cache: KVCache,
    state: State,
    read_only: ReadOnly = NOTHING,
    *,
    within: bool = False,
    mesh: Mesh | None = None,
) -> State:
    """Runs `reread` if the policy needs it, in one size for prompts of all lengths.

    `within` and `mesh` are as in `prefill_prompts`.
    """
    if policy.eviction is None or policy.eviction.reread is None:
        return state
    array = np if isinstance(tokens, np.ndarray) else jnp
    layer = cache.layers[0]
    if mesh is not None:  # the first axis is ranks
        layer = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], layer))
    width = layer.capacity
    tokens = array.pad(tokens, ((0, 0), (0, max(width - tokens.shape[1], 0))))[:, :width]
    run = inlined(reread) if within else reread.on(mesh)
    return run(decoder, policy, weights, jnp.asarray(tokens, jnp.int32), cache, state, read_only)


@program(
    static_argnames=("decoder", "policy"),
    donate_argnames=("state",),
    sharded=("weights", "cache", "state"),
    out=SHARDED,
)
def reread(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens,
    cache: KVCache,
    state: State,
    read_only: ReadOnly = NOTHING,
) -> State:
    """Shows the policy the queries with which the model reproduces each row's prompt.

    `tokens` are the prompts, padded; the cache holds nothing else.
    """
    again = policy.eviction and policy.eviction.reread
    if not again:
        return state
    size = min(again.chunk, tokens.shape[1])
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % size)))
    view = step_view(cache, read_only)
    end = view.positions
    positions = end[:, None] + jnp.arange(size, dtype=jnp.int32)

    def run_chunk(nth: Array, state: State) -> State:
        start = nth * size
        valid = jnp.clip(end - start, 0, size)
        part = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal state
            kv = view.layers[layer]
            k, v = as_held(kv, k, v)
            seen = RereadView(q, k, start, valid, view)
            state = kept(policy, "reread", state, again.score(state, layer, seen))
            # as if the chunk were appended
            return attend_chunk(q, k, v, kv._replace(lengths=kv.lengths + valid[:, None]), valid)

        hidden_states(decoder, weights, part, positions, attend)
        return state

    return jax.lax.fori_loop(0, (jnp.max(end) + size - 1) // size, run_chunk, state)
