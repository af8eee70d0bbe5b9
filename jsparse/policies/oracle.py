"""Oracles select by the exact attention weights.

They read all of K to avoid reading V, so they are references for quality (the selection of a
perfect method), not for speed.

The top-p variant is the oracle of Twilight (Lin et al., arXiv:2502.02770), the top-k variant that
of Quest (Tang et al., arXiv:2406.10774). A KV head serves a group of query heads: top-k ranks by
the highest weight in the group, top-p keeps the union of the group's sets.
"""

from functools import partial
from typing import Any, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse.builder import builder
from jsparse.cache import LayerCache, StepView, read_heads
from jsparse.hooks import State
from jsparse.hyper_parameters import fraction, one_of, whole_number
from jsparse.pallas_kernels.threshold_select import TopK, TopP, threshold_select
from jsparse.policy import Policy, knob
from jsparse.selection import Granularity


@builder
def oracle_top_k(budget: int = 1024, granularity: Granularity = "token") -> Policy:
    """Attends to the `budget` tokens with the highest exact attention weights.

    With granularity="page" these are the budget // P pages with the highest mass. Ties go to the
    oldest. Rows may set a smaller budget; a larger one counts as `budget`.
    """
    whole_number("budget", budget, 1)
    one_of("granularity", granularity, get_args(Granularity))

    def select(state: State, layer: int, q, view: StepView):
        kv = view.layers[layer]
        unit = _unit(granularity, kv)
        capacity = max(min(budget, kv.capacity) // unit, 1)
        wanted = knob(view, "budget", capacity * unit)
        rule = TopK(capacity if isinstance(wanted, int) else wanted.astype(jnp.int32) // unit)
        logits = attention_logits(q, kv)
        chosen = threshold_select(
            logits, rule, capacity=capacity, group="max", **_what(granularity, kv)
        )
        return chosen, None, state

    return Policy(select, shares="pages", per_row={"budget": partial(whole_number, minimum=1)})


@builder
def oracle_top_p(p: float = 0.95, granularity: Granularity = "token") -> Policy:
    """Attends to the fewest tokens whose exact attention weights sum to at least `p`.

    Each query head has its own set, of at least one token or, with granularity="page", one page.
    """
    fraction("p", p)
    one_of("granularity", granularity, get_args(Granularity))

    def select(state: State, layer: int, q, view: StepView):
        kv = view.layers[layer]
        units = kv.capacity // _unit(granularity, kv)
        logits = attention_logits(q, kv)
        return (
            threshold_select(
                logits, TopP(knob(view, "p", p)), capacity=units, **_what(granularity, kv)
            ),
            None,
            state,
        )

    return Policy(select, shares="pages", per_row={"p": fraction})


def attention_logits(q: Array, kv: LayerCache) -> Float32[Array, "B K G S"]:
    """Computes the exact logits of all slots, per KV head and query head of its group.

    Slots past a head's tokens get -inf.
    """
    keys = read_heads(kv.k, kv)
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
    logits = (
        jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
        * q.shape[-1] ** -0.5
    )
    if kv.bias is not None:
        logits += read_heads(kv.bias, kv)[:, :, None]
    seen = jnp.arange(kv.capacity, dtype=jnp.int32) < kv.lengths[..., None]
    return jnp.where(seen[:, :, None], logits, -jnp.inf)


def _unit(granularity: Granularity, kv: LayerCache) -> int:
    return kv.page_size if granularity == "page" else 1


def _what(granularity: Granularity, kv: LayerCache) -> dict[str, Any]:
    """Returns the arguments of `threshold_select` for a granularity."""
    return (
        {"granularity": "page_mass", "page_size": kv.page_size}
        if granularity == "page"
        else {"granularity": "token"}
    )
