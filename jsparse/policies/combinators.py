"""Wraps policies in what methods share: tokens that are always kept, layers that stay dense.

These are wrappers rather than flags of every method.
"""

from jsparse.cache import KVCache
from jsparse.policy import Policy, State, builder, require_policy, whole_number
from jsparse.selection import everything, union, window


@builder
def keep(policy: Policy, sink: int = 4, recent: int = 64) -> Policy:
    """Attend to what `policy` selects and to each head's first `sink` and last `recent` tokens."""
    require_policy("policy", policy)
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 0)

    def select(state: State, layer: int, q, cache: KVCache):
        chosen, summary, state = policy.select(state, layer, q, cache)
        if summary is not None:
            raise ValueError(
                f"policy={policy}: keep cannot wrap it, since its summary may stand for tokens "
                "that are kept"
            )
        held = cache.layers[layer]
        units = held.num_pages if chosen.granularity == "page" else held.capacity
        always = window(
            held.lengths,
            sink=sink,
            recent=recent,
            num_pages=held.num_pages,
            page_size=held.page_size,
            granularity=chosen.granularity,
        )
        return union(chosen, always, units), None, state

    return policy._replace(select=select, dense_at={"recent": 2**30})


@builder
def dense_layers(policy: Policy, n: int = 2) -> Policy:
    """Attend to everything in the first `n` layers and to what `policy` selects in the others.

    The first layers keep the policy's state up to date, but do not call its `select`.
    """
    require_policy("policy", policy)
    whole_number("n", n, 0)

    def select(state: State, layer: int, q, cache: KVCache):
        if layer < n:
            return everything(cache.layers[layer].lengths), None, state
        return policy.select(state, layer, q, cache)

    return policy._replace(select=select, dense_at={"n": 2**30})
