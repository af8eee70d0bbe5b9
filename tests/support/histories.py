"""Runs histories of a cache, for tests of data derived from its keys: 4-bit copies and bounds."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jsparse import cache as kv
from tests.support.small_cache import B, K, S, T

counts = st.lists(st.integers(0, T), min_size=B, max_size=B)
histories = st.lists(
    st.tuples(st.sampled_from(["append", "write"]), counts), min_size=1, max_size=8
)
# arguments: the derived data, the layer, its new keys, their number, and the first slot
type Keep = Callable[..., Any]


@partial(jax.jit, static_argnames="keep")
def step(cache, kept, k, valid, *, keep: Keep):
    """Appends tokens, and updates the derived data."""
    first = cache.layers[0].lengths
    cache = kv.append(cache, 0, k, k, jnp.zeros((B, T), jnp.int32), valid)
    return cache, keep(kept, cache.layers[0], k, valid, first)


@partial(jax.jit, static_argnames="keep")
def rewrite(cache, kept, k, valid, *, keep: Keep):
    """Overwrites the newest keys with others."""
    layer = cache.layers[0]
    first = layer.lengths - valid[:, None]
    layer = kv.write(layer, k, k, jnp.zeros((B, T), jnp.int32), valid, first)
    return kv.replace_layer(cache, 0, layer), keep(kept, layer, k, valid, first)


def after_each(history, seed: int, cache, kept, *, keep: Keep) -> Iterator[tuple[Any, Any]]:
    """Yields the cache and the derived data after each chunk or rewrite of random keys."""
    rng = np.random.default_rng(seed)
    head_dim = cache.layers[0].k.shape[-1]
    for kind, valid in history:
        lengths = np.asarray(cache.layers[0].lengths)
        room = S - lengths.max(1) if kind == "append" else lengths.min(1)
        valid = np.minimum(valid, room).astype(np.int32)
        k = rng.normal(size=(B, T, K, head_dim)).astype(np.float32)
        cache, kept = (step if kind == "append" else rewrite)(cache, kept, k, valid, keep=keep)
        yield cache, kept
