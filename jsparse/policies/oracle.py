"""Oracles: select by the exact attention weights. They read all of K to save reading V, so they are yardsticks of
quality (what a perfect selector would keep), not methods of speed.

The top-p variant is the oracle of Twilight (Lin et al., arXiv:2502.02770), the top-k variant that of Quest (Tang et
al., arXiv:2406.10774). A KV head serves a group of query heads: top-k ranks by the largest weight in the group, top-p
keeps the union of the group's sets.
"""

from typing import get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jsparse.cache import KVCache, LayerCache, read_heads
from jsparse.partials import softmax_partial
from jsparse.policy import Policy, State, builder, fraction, whole_number
from jsparse.selection import Granularity, Selection, from_page_mask, from_token_mask
from jsparse.threshold import top_k_mask, top_p_mask


@builder
def oracle_top_k(budget: int = 1024, granularity: Granularity = "token") -> Policy:
    """The `budget` tokens of largest weight, or the budget // P pages of largest mass; ties go to the oldest."""
    whole_number("budget", budget, 1)
    _check_granularity(granularity)

    def select(state: State, layer: int, q, cache: KVCache):
        held = cache.layers[layer]
        weights = attention_weights(q, held)
        unit = _unit(granularity, held.page_size)
        scores = _per_unit(weights, unit).max(axis=2)
        seen = _per_unit((_slots(held) < held.lengths[..., None]).astype(jnp.float32), unit) > 0
        capacity = _capacity(budget, held.capacity, unit)
        # an attended slot's weight can underflow to 0, which still ranks above an empty one
        mask = top_k_mask(jnp.where(seen, scores, -jnp.inf), capacity)
        return _listed(mask, capacity, granularity), None, state

    return Policy(select, full={"budget": 2**30})


@builder
def oracle_top_p(p: float = 0.95, granularity: Granularity = "token") -> Policy:
    """The smallest set of tokens (or of pages) whose weights sum to at least p, per query head; at least one."""
    fraction("p", p)
    _check_granularity(granularity)

    def select(state: State, layer: int, q, cache: KVCache):
        held = cache.layers[layer]
        unit = _unit(granularity, held.page_size)
        mask = top_p_mask(_per_unit(attention_weights(q, held), unit), p).any(axis=2)
        return _listed(mask, held.capacity // unit, granularity), None, state

    return Policy(select, full={"p": 1.0})


def attention_weights(q: Array, held: LayerCache) -> Float32[Array, "B K G S"]:
    """The exact softmax over all slots of each query head, by KV head and member of its group."""
    keys = read_heads(held.k, held)
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
    logits = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if held.bias is not None:
        logits += read_heads(held.bias, held)[:, :, None]
    seen = _slots(held) < held.lengths[..., None]
    weights, total, _ = softmax_partial(jnp.where(seen[:, :, None], logits, -jnp.inf))
    return weights / jnp.where(total == 0, 1.0, total)[..., None]


def _check_granularity(granularity: str) -> None:
    if granularity not in get_args(Granularity):
        raise ValueError(f"granularity={granularity!r}: must be one of {list(get_args(Granularity))}")


def _slots(held: LayerCache) -> Array:
    return jnp.arange(held.capacity, dtype=jnp.int32)


def _unit(granularity: Granularity, page_size: int) -> int:
    return page_size if granularity == "page" else 1


def _capacity(budget: int, slots: int, unit: int) -> int:
    return max(min(budget, slots) // unit, 1)


def _per_unit(weights: Array, unit: int) -> Array:
    return weights.reshape(*weights.shape[:-1], -1, unit).sum(-1)


def _listed(mask: Bool[Array, "B K units"], capacity: int, granularity: Granularity) -> Selection:
    if granularity == "page":
        return from_page_mask(mask, capacity)
    return from_token_mask(mask, capacity, page_size=1)
