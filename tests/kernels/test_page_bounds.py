"""page_bounds and its sidecar against slow numpy, and the one property that matters: no token scores above its page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse import cache as kv
from jsparse.pallas_kernels.page_bounds import page_bounds
from jsparse.pallas_kernels.page_bounds.cases import CASES, build
from jsparse.pallas_kernels.page_bounds.sidecar import append, init

by_name = {case.name: case for case in CASES}
B, K, P, M, H, T = 2, 2, 4, 3, 2, 6
S = P * M
SPEC = kv.CacheSpec(
    num_layers=1, batch=B, num_heads=4, num_kv_heads=K, head_dim=H, page_size=P, num_pages=M, dtype=jnp.float32
)


def physical(layer, b, n, page):
    if layer.block_table is not None:
        return int(layer.block_table[b, n, page])
    return (b * layer.lengths.shape[1] + n) * layer.num_pages + page


def slow(q, layer, bounds, sm_scale):
    q, low, high = (np.asarray(x, np.float64) for x in (q, bounds.low, bounds.high))
    lengths, (batch, heads) = np.asarray(layer.lengths), layer.lengths.shape
    group = q.shape[1] // heads
    out = np.full((batch, heads, layer.num_pages), -np.inf)
    for b, n, page in np.ndindex(out.shape):
        if page * layer.page_size >= lengths[b, n]:
            continue
        lies = physical(layer, b, n, page)
        for query in q[b, n * group : (n + 1) * group]:
            score = sm_scale * np.maximum(query * high[lies], query * low[lies]).sum()
            out[b, n, page] = max(out[b, n, page], score)
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_slow_formula(case):
    inputs = build(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    out = jax.jit(lambda inputs: page_bounds(*inputs, sm_scale=case.sm_scale))(inputs)
    assert out.dtype == np.float32
    want = slow(*inputs, scale)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * case.spread)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_token_scores_above_its_page(case):
    q, layer, bounds = build(case, 1)
    out = np.asarray(page_bounds(q, layer, bounds, sm_scale=1.0))
    keys = np.asarray(kv.read_heads(layer.k, layer), np.float64)
    grouped = np.asarray(q, np.float64).reshape(*out.shape[:2], -1, q.shape[-1])
    scores = np.einsum("bkgh,bksh->bkgs", grouped, keys).max(2).reshape(*out.shape, layer.page_size)
    held = (np.arange(layer.capacity) < np.asarray(layer.lengths)[..., None]).reshape(scores.shape)
    top = np.where(held, scores, -np.inf).max(-1)
    assert (out >= top - 1e-5 * np.abs(top).max(initial=1.0, where=np.isfinite(top))).all()
    np.testing.assert_array_equal(np.isneginf(out), ~held.any(-1))


counts = st.lists(st.integers(0, T), min_size=B, max_size=B)
histories = st.lists(st.tuples(st.sampled_from(["append", "write"]), counts), min_size=1, max_size=8)


@jax.jit
def step(cache, bounds, k, valid):
    positions = jnp.zeros((B, T), jnp.int32)
    first = cache.layers[0].lengths
    cache = kv.append(cache, 0, k, k, positions, valid)
    return cache, append(bounds, cache.layers[0], valid, first, max_new=T)


@jax.jit
def rewrite(cache, bounds, k, valid):
    layer = cache.layers[0]
    first = layer.lengths - valid[:, None]
    layer = kv.write(layer, k, k, jnp.zeros((B, T), jnp.int32), valid, first)
    return kv.replace_layer(cache, 0, layer), append(bounds, layer, valid, first, max_new=T)


@settings(max_examples=25)
@given(history=histories, paged=st.booleans(), seed=st.integers(0, 2**16))
def test_bounds_are_those_of_the_tokens_held_whatever_the_history(history, paged, seed):
    """Appended in chunks, written again, under a table or none: always the tightest bounds, and no other page's."""
    rng = np.random.default_rng(seed)
    pool = B * K * M + 1 if paged else None
    cache, bounds = kv.init(SPEC, pool_pages=pool), init(SPEC, pool_pages=pool)
    for kind, valid in history:
        lengths = np.asarray(cache.layers[0].lengths)
        room = S - lengths.max(1) if kind == "append" else lengths.min(1)
        valid = np.minimum(valid, room).astype(np.int32)
        k = rng.normal(size=(B, T, K, H)).astype(np.float32)
        cache, bounds = (step if kind == "append" else rewrite)(cache, bounds, k, valid)
        layer = cache.layers[0]
        keys, low, high = np.asarray(layer.k), np.asarray(bounds.low), np.asarray(bounds.high)
        for b, n, page in np.ndindex(B, K, M):
            held = min(max(int(layer.lengths[b, n]) - page * P, 0), P)
            if held:
                lies = physical(layer, b, n, page)
                np.testing.assert_array_equal(low[lies], keys[lies, :held].min(0))
                np.testing.assert_array_equal(high[lies], keys[lies, :held].max(0))


def test_only_the_pages_written_are_touched():
    cache, bounds = kv.init(SPEC), init(SPEC)
    ones = jnp.ones((B, T, K, H))
    cache, bounds = step(cache, bounds, ones, jnp.array([5, 0], jnp.int32))
    cache = kv.replace_layer(cache, 0, cache.layers[0]._replace(k=cache.layers[0].k + 1))  # behind the sidecar's back
    _, bounds = step(cache, bounds, 4 * ones, jnp.array([1, 2], jnp.int32))
    np.testing.assert_array_equal(bounds.high[:, 0].reshape(B, K, M), [[[1, 4, 0]] * 2, [[4, 0, 0]] * 2])
    np.testing.assert_array_equal(bounds.low[:, 0].reshape(B, K, M), [[[1, 2, 0]] * 2, [[4, 0, 0]] * 2])


def test_tokens_without_room_change_no_page_of_another_head():
    cache, bounds = kv.init(SPEC), init(SPEC)
    for value in (1.0, 2.0):
        full = jnp.full((B, T, K, H), value)
        cache, bounds = step(cache, bounds, full, jnp.array([T, 0], jnp.int32))
    cache, bounds = step(cache, bounds, jnp.full((B, T, K, H), 9.0), jnp.array([T, 0], jnp.int32))
    assert bool(cache.overflow)
    np.testing.assert_array_equal(bounds.high[:, 0].reshape(B, K, M), [[[1, 2, 2]] * 2, [[0, 0, 0]] * 2])
    out = page_bounds(jnp.ones((B, 4, H)), cache.layers[0], bounds)
    assert out.shape == (B, K, M)
    assert bool(jnp.isneginf(out[1]).all())


def wrong_calls():
    q, layer, bounds = build(by_name["ragged"])
    return {
        "head dimension": ((q[..., :32], layer, bounds), {}, "must equal the cache's head dimension, 64"),
        "heads of q": ((q[:, :5], layer, bounds), {}, r"q.shape=\(2, 5, 64\).*N a multiple of K"),
        "low": ((q, layer, bounds._replace(low=bounds.low[:3])), {}, r"bounds.low.shape=\(3, 64\): must be \(24, 64\)"),
        "high": ((q, layer, bounds._replace(high=bounds.high[:, :8])), {}, r"bounds.high.shape=\(24, 8\)"),
        "sm_scale": ((q, layer, bounds), {"sm_scale": -1.0}, "sm_scale=-1.0: must be above 0"),
        "backend": ((q, layer, bounds), {"implementation": "abacus"}, "implementation='abacus': page_bounds has"),
        "dtype": (
            (q.astype(jnp.bfloat16), layer, bounds),
            {"implementation": "triton"},
            "takes queries of the bounds' dtype, float32, not bfloat16",
        ),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_calls_are_refused(name):
    args, kwargs, message = wrong_calls()[name]
    with pytest.raises(ValueError, match=message) as error:
        page_bounds(*args, **kwargs)
    assert "\n" not in str(error.value)


def test_cases_are_what_they_say():
    assert len(by_name) == len(CASES)
    _, layer, bounds = build(by_name["ragged"])
    empty = np.asarray(layer.lengths).reshape(-1, 1) <= np.arange(6) * 16
    np.testing.assert_array_equal(np.asarray(bounds.low).reshape(4, 6, 64)[..., 0] > 1e29, empty)
