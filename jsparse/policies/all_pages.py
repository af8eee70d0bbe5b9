"""Lists every page, as the base that Twilight prunes if no other policy selects first.

Attention over it is exact. `dense` attends to the same tokens, but cannot be pruned.
"""

import jax.numpy as jnp

from jsparse.builder import builder
from jsparse.cache import StepView
from jsparse.hooks import State
from jsparse.policy import Policy
from jsparse.selection import Selection


@builder
def all_pages() -> Policy:
    """Attends to every page with a token, listed so that `twilight` can prune it."""

    def select(state: State, layer: int, q, view: StepView):
        kv = view.layers[layer]
        used = -(-kv.lengths // kv.page_size)
        page = jnp.arange(kv.num_pages, dtype=jnp.int32)
        return Selection(jnp.where(page < used[..., None], page, 0), used), None, state

    return Policy(select, shares="pages", reads=0)
