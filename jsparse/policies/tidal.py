"""TidalDecode lets some layers attend to everything and pick tokens for the layers behind them.

Tokens that matter in one layer matter in the next ones too, so two layers' picks serve all.

Paper: "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention" (Yang
et al.), arXiv:2410.05076.

Where we differ: the weights of a group's mean query stand for its query heads, since dense
attention can report them without a second pass over K. The weights of all KV heads are averaged, so
that every head attends to the same tokens.
"""

import jax.numpy as jnp

from jsparse.cache import KVCache
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.policy import Policy, State, builder, whole_number
from jsparse.selection import Selection, everything


@builder
def tidal(budget: int = 1024, first: int = 2, again: int = 13) -> Policy:
    """Attend to the `budget` tokens that layer `first`, and later `again`, weighs most.

    Layers up to `first` and layer `again` are dense. The defaults are the paper's for models of 32
    layers; a model without layer `again` picks once. All heads of a row must hold the same number
    of tokens.
    """
    for name, value, least in (("budget", budget, 1), ("first", first, 0), ("again", again, 0)):
        whole_number(name, value, least)

    def picks(layer: int) -> bool:
        return layer in (first, again)

    def init(spec):
        capacity = min(budget, spec.capacity)
        return jnp.zeros((spec.batch, capacity), jnp.int32), jnp.zeros(spec.batch, jnp.int32)

    def select(state: State, layer: int, q, cache: KVCache):
        lengths = cache.layers[layer].lengths
        if layer < first or picks(layer):
            return everything(lengths), None, state
        ids, count = state
        ids = jnp.broadcast_to(ids[:, None], (*lengths.shape, ids.shape[-1]))
        return (
            Selection(ids, jnp.broadcast_to(count[:, None], lengths.shape), granularity="token"),
            None,
            state,
        )

    def update(state: State, layer: int, stats, cache: KVCache):
        if not picks(layer):
            return state
        weights = jnp.exp(stats.scores - stats.lse[..., None])
        weights = jnp.mean(jnp.where(jnp.isfinite(stats.scores), weights, 0.0), axis=1)
        held = jnp.max(cache.layers[layer].lengths, axis=1, keepdims=True)
        capacity = state[0].shape[-1]
        chosen = threshold_select(
            weights[:, None, None], TopK(capacity), capacity=capacity, weights="raw", lengths=held
        )
        return chosen.ids[:, 0], chosen.count[:, 0]

    def stats(layer: int):
        return "token_logits" if picks(layer) else None

    return Policy(
        select, init=init, update=update, stats=stats, shares="pages", dense_at={"budget": 2**30}
    )
