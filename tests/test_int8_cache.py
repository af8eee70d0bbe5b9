"""Tests K and V in 8 bits: their numbers, every policy over them, and models with extreme keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import cache as kv
from jsparse.builder import dense
from jsparse.cache import KEY_REACH, Int8Pages
from jsparse.evaluation import contract_violations
from jsparse.evaluation.policy_checks import check
from jsparse.evaluation.policy_trial import random_model
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import random_weights
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity, chunk_attention
from jsparse.runtime.constants import constants
from jsparse.runtime.sampling import greedy
from jsparse.runtime.session import Session
from tests.support.policy_table import METHODS, at_dense
from tests.support.small_cache import B, K, M, P, S, T, small_spec
from tests.support.tiny import engine_logits, random_prompts, random_tokens

H = 8
REACH = np.exp(np.random.default_rng(3).normal(size=(K, H))).astype(np.float32)


def in_int8(params):
    return dataclasses.replace(params, kv_cache_dtype="int8")


def empty(reach=None, pool_pages=None):
    """A layer in 8 bits, with the reach of K's channels."""
    spec = small_spec(head_dim=H)._replace(kv_cache_dtype="int8", pool_pages=pool_pages)
    cache = kv.init(spec)
    (layer,) = cache.layers
    return cache._replace(layers=(layer._replace(k=dataclasses.replace(layer.k, reach=reach)),))


def nearest(x, reach):
    """The format, from its description: integers up to 127 times a bfloat16 factor per token."""
    x = np.asarray(x, np.float64) / reach
    factors = jnp.asarray(np.abs(x).max(-1, keepdims=True) / 127).astype(jnp.bfloat16)
    factors = np.asarray(factors, np.float64)
    whole = np.clip(np.rint(x / np.where(factors == 0, 1, factors)), -127, 127)
    return whole * factors * reach


@jax.jit
def appended_and_read(cache, k, v):
    """K and V in the cache, read in every way, and as `as_held` foretells them."""
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    (layer,) = kv.append(cache, 0, k, v, positions, jnp.full(B, T, jnp.int32)).layers
    slots = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, K, T))
    pages = jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32), (B, K, M))
    read = [
        (
            held.swapaxes(1, 2),
            kv.read_slots(pool, layer, slots),
            kv.read_heads(pool, layer)[:, :, :T],
            kv.read_pages(pool, layer, pages).reshape(B, K, S, H)[:, :, :T],
        )
        for pool, held in zip((layer.k, layer.v), kv.as_held(layer, k, v), strict=True)
    ]
    return read


def test_tokens_are_rounded_to_the_nearest_of_255_steps():
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, B, T, K, H)) * np.exp(rng.normal(size=(2, B, T, K, 1)))
    k, v = (x.astype(np.float32) for x in (k * REACH, v))
    v[0, 0, 0] = 0
    for pool_pages in (None, B * K * M + 1):
        read = jax.device_get(appended_and_read(empty(REACH, pool_pages), k, v))
        for (held, *others), x, reach in zip(read, (k, v), (REACH[:, None], 1.0), strict=True):
            x = x.swapaxes(1, 2)
            np.testing.assert_allclose(held, nearest(x, reach), rtol=1e-6)
            for other in others:
                np.testing.assert_array_equal(other, held)
            largest = np.abs(x / reach).max(-1, keepdims=True)
            assert (np.abs(held - x) <= 0.503 / 127 * largest * reach + 1e-9).all()


def test_nan_is_a_zero_in_the_cache_and_stays_nan_where_it_is_computed():
    k = np.ones((B, T, K, H), np.float32)
    k[0, 0, 0, 3], k[1, 2, 1, 5] = np.nan, np.inf
    (held, *others), _ = jax.device_get(appended_and_read(empty(REACH), k, k))
    assert all(np.isfinite(other).all() for other in others)
    broken = ~np.isfinite(held).all(-1)
    assert [*zip(*np.nonzero(broken), strict=True)] == [(0, 0, 0), (1, 1, 2)]


def test_a_cache_takes_half_the_bytes_of_bfloat16():
    spec = small_spec(head_dim=128)._replace(dtype=jnp.dtype("bfloat16"))
    whole, half = spec.nbytes, spec._replace(kv_cache_dtype="int8").nbytes
    assert whole / half > 1.96
    cache = jax.eval_shape(lambda: kv.init(spec._replace(kv_cache_dtype="int8")))
    pools = [pool for layer in cache.layers for pool in (layer.k, layer.v)]
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools)) == half
    assert cache.layers[0].slot_bytes == 2 * 130
    assert kv.spec_of(cache, spec.num_heads).nbytes == half


SNAPKV = "snapkv(budget=8, window=4, pool=3)"


def test_evicting_policy_keeps_the_contract():
    found = check(parse(SNAPKV), params=in_int8(random_model(1)), rules=["retrace", "inactive"])
    assert all(finding.kept for finding in found.findings)


@pytest.mark.slow
@pytest.mark.parametrize("expression", METHODS)
def test_every_policy_keeps_the_contract(expression, monkeypatch):
    """At a full budget also dense attention over the same K and V.

    Then a number halfway between two integers may be rounded differently, which changes logits by a
    hundredth of the largest at most.
    """
    params, full = in_int8(random_model()), at_dense(expression)
    rules = ("runs", "finite", "rows", "pool", "retrace", "inactive")
    found = check(parse(expression), full, params=params, rules=rules).findings
    monkeypatch.setattr(contract_violations, "CLOSE", 1e-2)
    found += check(parse(expression), full, params=params, rules=["budget"]).findings
    assert not [finding for finding in found if finding.kept is False]
    assert [finding for finding in found if finding.kept]


def test_hooks_and_the_prompts_attention_get_the_rounded_numbers():
    """So that chunk sizes and cached prefixes do not change a result."""

    def apart(state, layer, k, view, last):
        held = view.layers[layer]
        slots = last[:, None, None] - k.shape[1] + jnp.arange(k.shape[1], dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, (len(k), held.lengths.shape[1], k.shape[1]))
        rows = kv.read_slots(held.k, held, slots).swapaxes(1, 2)
        return jnp.maximum(state, jnp.max(jnp.abs(rows - k), axis=(1, 2, 3)))

    def prefill(state, layer, part):  # in chunks without padding
        return apart(state, layer, part.k, part.step, part.step.layers[layer].lengths[:, 0])

    def append(state, layer, k, v, tokens, positions, view):
        return apart(state, layer, k, view, view.layers[layer].lengths[:, 0])

    policy = dense()._replace(
        init=lambda spec: jnp.zeros(spec.batch), prefill=prefill, append=append, name="watching"
    )
    params, (prompt,) = in_int8(random_model(1)), random_prompts((64,))
    spec = capacity.cache_spec(params, [prompt], 4, None, 8)
    session = Session(params, policy, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "chunk_tokens", lambda *_: 64)
        session.prefill([prompt])
    assert session.prefilled.state.tolist() == [0.0]
    [*_, last] = session.steps(greedy, (), limits=[4])
    assert last.tokens.shape == (1, 1)
    assert session._stage.prefilled.state.tolist() == [0.0]


def extreme(bias: float) -> Params:
    """A random model with constant channels of K that are far from 0, as Qwen2.5's are."""
    config = dataclasses.replace(random_model(2).config, qkv_bias=True)
    weights = random_weights(config, jnp.float32, seed=1)["params"]
    keys = config.num_heads * config.head_dim + np.array([7, 15, 23])
    for nth in range(config.num_layers):
        own = weights[f"layers_{nth}"]["attention"]["qkv"]
        own["bias"] = own["bias"].at[keys].add(bias)
    return Params({"params": weights}, config, None, {}, "extreme")


def divergence(params):
    """The mean KL divergence of 8-bit K and V from the model's own, over 20 tokens."""
    prompts, forced = random_prompts((60, 41)), random_tokens(2, 20)
    whole, rounded = (
        jax.nn.log_softmax(engine_logits(model, "dense", prompts, forced, page_size=8))
        for model in (params, in_int8(params))
    )
    return float(jnp.mean(jnp.sum(jnp.exp(whole) * (whole - rounded), -1)))


@pytest.mark.slow
def test_constant_channels_of_keys_do_not_drown_the_others():
    params = extreme(100.0)
    framed = divergence(params)
    reach = constants(in_int8(params), jsparse.dense())[KEY_REACH]
    assert np.asarray(reach).max() > 80
    plain = dataclasses.replace(params, constants={KEY_REACH: jnp.ones_like(reach)})
    assert framed < 1e-3
    assert divergence(plain) > 5 * framed


def test_other_types_are_refused():
    params = random_model(1)
    for name, said in (
        ("fp8", "kv_cache_dtype='fp8': must be 'int8', which is as small; 3 bits"),
        ("fp8_e4m3", "kv_cache_dtype='fp8_e4m3': must be 'int8'"),
        ("int4", r"kv_cache_dtype='int4': must be one of \['auto', 'int8'\]"),
        (None, "kv_cache_dtype=None: must be one of"),
    ):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(params, kv_cache_dtype=name)


def test_pages_borrow_the_reach_for_one_program():
    params = in_int8(random_model(1))
    read_only = kv.ReadOnly(constants(params, jsparse.dense()))
    spec = small_spec(head_dim=16)._replace(kv_cache_dtype="int8", num_layers=1)
    view = kv.step_view(kv.init(spec), read_only)
    pool = view.layers[0].k
    assert isinstance(pool, Int8Pages)
    assert pool.reach is not None
    np.testing.assert_array_equal(pool.reach[:, :8], pool.reach[:, 8:])
    assert view.layers[0].v.reach is None
    assert kv.without_borrowed(view.cache).layers[0].k.reach is None
    assert spec.page_size == P
