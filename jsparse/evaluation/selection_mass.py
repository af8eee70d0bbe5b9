"""Measures the attention mass of selections, on a model in which near tokens matter most."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse.cache import LayerCache
from jsparse.models.checkpoint import Params
from jsparse.models.indexer import INDEXER
from jsparse.policies.oracle import attention_logits
from jsparse.selection import Selection
from jsparse.selection.attended import token_mask
from jsparse.shapes import Queries

# A random model's embeddings have a deviation of 1. With these, selections of our policies have 1.0
# to 13 times the mass of random ones, and the first page alone has half of it.
FIRST_CHANNEL, COMMON_PART = 4.0, 1.3


def with_recency(params: Params) -> Params:
    """Returns a random model changed so that heads weigh near tokens most, as real models do.

    All embeddings get the same first channel, which all channels of queries and keys repeat. RoPE
    makes that part of a logit largest between equal positions. Sizes do not change, so programs are
    reused. Constants that belong to the old weights are dropped.
    """
    config, tree = params.config, dict(params.weights["params"])
    tree["embed"] = tree["embed"].at[:, 0].set(FIRST_CHANNEL)
    rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
    for name in [f"layers_{nth}" for nth in range(config.num_layers)]:
        attention = tree[name]["attention"]
        kernel = attention["qkv"]["kernel"].at[0, :rotated].set(COMMON_PART)
        tree[name] = tree[name] | {"attention": attention | {"qkv": {"kernel": kernel}}}
    kept = {name: array for name, array in params.constants.items() if name in INDEXER}
    return replace(params, weights={"params": tree}, constants=kept)


def covered(
    q: Queries, kv: LayerCache, selection: Selection
) -> tuple[Float32[Array, "B K"], Float32[Array, "B K"]]:
    """Returns the shares of the tokens before the newest that each head's selection covers.

    The first is of their number, the average mass of a random selection of that size; the second of
    dense attention's mass on them.
    """
    older = jnp.arange(kv.capacity, dtype=jnp.int32) < kv.lengths[..., None] - 1
    listed = older & token_mask(
        selection, kv.lengths, num_pages=kv.num_pages, page_size=kv.page_size
    )
    logits = jnp.where(older[:, :, None], attention_logits(q, kv), -jnp.inf)
    weights = jnp.mean(jax.nn.softmax(logits), axis=2)
    return jnp.sum(listed, -1) / jnp.sum(older, -1), jnp.sum(weights * listed, -1)
