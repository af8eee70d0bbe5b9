"""Decode with Quest (paper) in two functions; `--policy examples/my_quest.py:my_quest` names it."""

import jax.numpy as jnp

import jsparse
from jsparse.extend import Policy, builder, page_policy


def bounds(keys, valid):
    """Keeps the least and greatest value of each channel of a page's keys [P, H]."""
    return keys.min(axis=0), keys.max(axis=0)


def greatest_logit(q, page):
    """Returns the greatest q·k that a page's bounds allow, over the query heads [G, H]."""
    low, high = page
    return jnp.maximum(q * low, q * high).sum(axis=-1).max()


@builder
def my_quest(budget: int = 1024) -> Policy:
    """Attends to the pages whose key bounds allow the greatest logits."""
    return page_policy(bounds, greatest_logit, budget)


if __name__ == "__main__":
    params = jsparse.load("smollm2")
    out = jsparse.generate(params, "Gravity is", max_new_tokens=40, policy=my_quest(budget=16))
    print(f"attended {out.stats.attended_fraction:.0%} of the tokens")
    print(out.text)
