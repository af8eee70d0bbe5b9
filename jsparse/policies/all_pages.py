"""Every page, as a list: the base from which Twilight prunes when nothing selected before it.

Attention over it is exact. `dense` attends to the same, but says that nothing of it may be pruned.
"""

import jax.numpy as jnp

from jsparse.cache import KVCache
from jsparse.policy import Policy, State, builder
from jsparse.selection import Selection


@builder
def all_pages() -> Policy:
    """All pages that hold a token."""

    def select(state: State, layer: int, q, cache: KVCache):
        held = cache.layers[layer]
        used = -(-held.lengths // held.page_size)
        page = jnp.arange(held.num_pages, dtype=jnp.int32)
        return Selection(jnp.where(page < used[..., None], page, 0), used), None, state

    return Policy(select, dense_at={})
