"""Do methods hold on heads that they were not tuned on?

Recorded heads of a Qwen2.5, and models whose queries and keys are scaled pair by pair: attention
computes the same.
"""

import dataclasses
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.attended import token_mask
from jsparse.cache import CacheSpec, KVCache, StepView
from jsparse.model_facts.constants import mid_and_scale
from jsparse.model_facts.key_constants import KeyConstants, angles_at, rotated
from jsparse.policies.expressions import parse
from tests.support.marks import slow_except
from tests.support.policy_table import METHODS
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

KEYS = Path(__file__).parents[1] / "fixtures" / "keys" / "qwen2_5_0_5b.npz"
PAGE, PROMPTS, FORCED = 8, random_prompts((37, 9)), random_tokens(2, 20)


# Models whose q and k of each pair are scaled by s and 1/s. Methods that compare keys with keys are
# not among those here: cosines and distances of keys are others then.
KEYS_WITH_KEYS = "r_kv", "lychee_cluster", "cluster_kv", "volume='ball'"
# Nor are those that choose by position alone, or leave the choice to the policy they wrap.
NO_KEYS = "dense", "streaming", "all_pages", "duo", "keep", "retrieval_heads", "offloaded"
SCALE_FREE = [
    x
    for x in METHODS
    if not any(name in x for name in KEYS_WITH_KEYS) and not x.startswith(NO_KEYS)
]


@cache
def scaled_params(layers):
    """The battery's model with s = 2^-5 … 2^5 per layer, KV head and pair.

    Powers of two round nothing, so that even ties fall the same way.
    """
    params = tiny_params(num_layers=layers)
    c, rng = params.config, np.random.default_rng(7)
    half, group = c.head_dim // 2, c.num_heads // c.num_kv_heads
    tree = jax.tree.map(lambda x: x, params.weights)
    for layer in range(c.num_layers):
        s = np.exp2(rng.integers(-5, 6, (c.num_kv_heads, half)))
        s = np.tile(s, (1, 2))  # both channels of a pair
        columns = np.concatenate([np.repeat(s, group, axis=0), 1 / s, np.ones_like(s)]).ravel()
        qkv = tree["params"][f"layers_{layer}"]["attention"]["qkv"]
        qkv["kernel"] = qkv["kernel"] * jnp.asarray(columns, jnp.float32)
    return dataclasses.replace(params, weights=tree, constants={})


# those that rank channels, pages, or keys through constants of the model
SENSITIVE = "double_sparsity(budget=8)", "quest(budget=16)", "twilight(all_pages(), p=0.6)"


@pytest.mark.slow
@pytest.mark.parametrize("expression", slow_except(SCALE_FREE, SENSITIVE[-1]))
def test_pairs_of_another_scale_change_nothing(expression):
    layers = 1 if expression in SENSITIVE else 2
    run = partial(engine_logits, policy=expression, prompts=PROMPTS, forced=FORCED, page_size=PAGE)
    assert_close(run(scaled_params(layers)), run(tiny_params(num_layers=layers)), rtol=1e-5)


# Recorded heads of Qwen2.5-0.5B.

HEADS, TOKENS, DIM = 7, 2048, 64
FREQUENCIES = jnp.asarray(1e6 ** (-np.arange(0, DIM, 2) / DIM), jnp.float32)


@cache
def recorded():
    """Keys [7, 2048, 64] and queries [7, 224, 64] at positions 0 … 2047, after RoPE."""
    with np.load(KEYS) as file:
        keys, queries = (jnp.asarray(file[name], jnp.float32) for name in ("keys", "queries"))
    return keys, queries.reshape(HEADS, -1, DIM)


def scaled_pairs(seed):
    """s of every head and pair, log-uniform in 1/30 … 30."""
    spread = np.log(30)
    s = np.exp(np.random.default_rng(seed).uniform(-spread, spread, (HEADS, 1, DIM // 2)))
    return jnp.asarray(np.tile(s, 2), jnp.float32)


def recorded_spec(offset):
    """The sizes of a cache that begins at this position."""
    pages = (offset + TOKENS) // 16
    sizes = (1, 1, HEADS, HEADS, DIM, 16, pages, jnp.float32)
    return CacheSpec(*sizes, pool_pages=HEADS * TOKENS // 16 + 1)


@partial(jax.jit, static_argnums=1)
def recorded_cache(keys, offset, constants):
    """A cache whose heads hold `keys` from position `offset` on, in pages of their own.

    All positions before lie in the scratch page.
    """
    spec, page, before = recorded_spec(offset), 16, offset // 16
    held = kv_cache.init(spec).layers[0]
    assert held.block_table is not None
    own = jnp.arange(HEADS * TOKENS // page, dtype=jnp.int32).reshape(1, HEADS, -1)
    held = held._replace(
        block_table=held.block_table.at[:, :, before:].set(own),
        lengths=jnp.full((1, HEADS), offset + TOKENS, jnp.int32),
        k=held.k.at[:-1].set(keys.reshape(-1, page, DIM)),
    )
    positions, overflow = jnp.array([offset + TOKENS]), jnp.array([False])
    return StepView(KVCache((held,), positions, overflow), constants._asdict())


@partial(jax.jit, static_argnames=("policy", "spec"))
def selected(policy, spec, view, keys, queries):
    """What each query attends to of the last TOKENS, alone: bool[7, 224, TOKENS]."""
    k = keys.swapaxes(0, 1)[None]
    positions = view.positions[:, None] - TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    state = policy.append(policy.init(spec), 0, k, k, positions, positions, view)

    def attended(q):
        chosen, *_ = policy.select(state, 0, q[None], view)
        held = view.layers[0]
        slots = token_mask(chosen, held.lengths, num_pages=held.num_pages, page_size=held.page_size)
        return slots[0, :, -TOKENS:]

    return jax.lax.map(attended, queries.swapaxes(0, 1)).swapaxes(0, 1)


def true_mass(mask, keys, queries):
    logits = np.einsum("hqd,hkd->hqk", *(np.asarray(x, np.float64) for x in (queries, keys)))
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / DIM**0.5)
    return (weights * np.asarray(mask)).sum(-1) / weights.sum(-1)


@jax.jit
def at(x, positions):
    """Rotates heads [7, n, 64] by these positions."""
    return rotated(x, angles_at(jnp.asarray(positions), FREQUENCIES))


@pytest.mark.parametrize("scaled", slow_except([False, True], True))
@pytest.mark.parametrize("offset", slow_except([0, 130048], 130048))
def test_twilight_keeps_the_mass_that_it_asks_for_on_recorded_heads(offset, scaled):
    """Constants are those of every second key, made near position 0, wherever the keys lie."""
    keys, queries = recorded()
    if scaled:
        s = scaled_pairs(0)
        keys, queries = keys * s, queries / s
    second = np.arange(0, TOKENS, 2)
    mid, scale = jax.jit(mid_and_scale)(keys[:, ::2], queries, second, FREQUENCIES)
    constants = KeyConstants(mid[None], scale[None], FREQUENCIES)
    keys, queries = (at(x, np.array([offset])) for x in (keys, queries))
    policy = parse(f"twilight(streaming(sink=0, recent={TOKENS}), p=0.95, prune='token')")
    spec = recorded_spec(offset)
    cache = recorded_cache(keys, offset, constants)
    mass = true_mass(selected(policy, spec, cache, keys, queries), keys, queries)
    assert mass.mean() >= 0.94
    assert np.percentile(mass, 1) >= 0.87
