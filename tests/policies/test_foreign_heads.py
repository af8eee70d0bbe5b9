"""Tests that Twilight keeps the requested mass on recorded heads of Qwen2.5-0.5B."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, Int8Pages, KVCache, StepView
from jsparse.cache.key_constants import KeyConstants, angles_at, rotated
from jsparse.policies.expressions import parse
from jsparse.runtime.constants import mid_and_scale, reach_of
from jsparse.selection.attended import token_mask
from tests.support.marks import slow_except

KEYS = Path(__file__).parents[1] / "fixtures" / "keys" / "qwen2_5_0_5b.npz"


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
    """The sizes of a cache that starts at this position."""
    pages = (offset + TOKENS) // 16
    sizes = (1, 1, HEADS, HEADS, DIM, 16, pages, jnp.float32)
    return CacheSpec(*sizes, pool_pages=HEADS * TOKENS // 16 + 1)


@partial(jax.jit, static_argnums=1)
def recorded_cache(keys, offset, constants):
    """A cache whose heads hold `keys` from position `offset` on, in separate pages.

    All earlier positions are in the scratch page.
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
    """The tokens among the last TOKENS that each query attends to: bool[7, 224, TOKENS]."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "scaled", "nth"),
    [
        (130048, True, 4),
        *((offset, scaled, 1) for offset in (0, 130048) for scaled in (False, True)),
    ],
)
def test_twilight_keeps_the_requested_mass_on_recorded_heads(offset, scaled, nth):
    """The constants come from every second key near position 0, at any position of the keys.

    Every nth query is tested.
    """
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
    cache, queries = recorded_cache(keys, offset, constants), queries[:, ::nth]
    mass = true_mass(selected(policy, spec, cache, keys, queries), keys, queries)
    assert mass.mean() >= 0.94
    assert np.percentile(mass, 1) >= 0.87


def divergence(keys, other, queries):
    """The mean KL divergence of attention over other keys from attention over keys, by head."""
    logits = (
        np.einsum("hqd,hkd->hqk", queries, np.asarray(k, np.float64)) / DIM**0.5
        for k in (keys, other)
    )
    shifted = (x - x.max(-1, keepdims=True) for x in logits)
    exact, rounded = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in shifted)
    return (np.exp(exact) * (exact - rounded)).sum(-1).mean(-1)


def in_8_bits(keys, reach):
    """Keys [7, n, 64] as a cache in 8 bits holds them."""
    pages = jnp.zeros((1, 1, DIM), jnp.int8), jnp.zeros((1, 1), jnp.bfloat16)
    return Int8Pages(*pages, reach, jnp.dtype(jnp.float32)).rounded(keys[None])[0]


@pytest.mark.parametrize("offset", slow_except([0, 130048], 130048))
def test_8_bits_keep_attention_on_recorded_heads(offset):
    """Pairs of any size, also far from the positions of the keys whose reach is known.

    The two heads of layer 0 suffer from bfloat16 as well, since their keys are up to 145.
    """
    keys, queries = recorded()
    s = scaled_pairs(1)
    reach = jnp.tile(reach_of((keys * s)[:, :512]), 2)
    keys, queries = (at(x, np.array([offset])) for x in (keys * s, queries / s))
    queries = np.asarray(queries, np.float64)
    lost, without = (
        divergence(keys, in_8_bits(keys, each), queries) for each in (reach, jnp.ones_like(reach))
    )
    of_bfloat16 = divergence(keys, keys.astype(jnp.bfloat16), queries)
    assert (lost < 8 * of_bfloat16 + 2e-3).all()
    assert (without > 10 * lost).all()
