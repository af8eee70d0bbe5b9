"""Decode with a policy of your own; `--policy examples/own_policy.py:newest_pages` names it."""

import jax.numpy as jnp

import jsparse
from jsparse.extend import Policy, Selection, builder


@builder
def newest_pages(pages: int = 32) -> Policy:
    """Attends to the newest pages of each head."""

    def select(state, layer, q, view):
        kv = view.layers[layer]
        nth = jnp.arange(min(pages, kv.num_pages), dtype=jnp.int32)
        used = -(-kv.lengths // kv.page_size)  # [B, K], pages that hold a token
        count = jnp.minimum(used, len(nth))
        ids = jnp.where(nth < count[..., None], (used - count)[..., None] + nth, 0)
        return Selection(ids, count), None, state

    return Policy(select)


if __name__ == "__main__":
    params = jsparse.load("smollm2")
    out = jsparse.generate(params, "Gravity is", max_new_tokens=40, policy=newest_pages(pages=1))
    print(f"attended {out.stats.attended_fraction:.0%} of the tokens")
    print(out.text)
