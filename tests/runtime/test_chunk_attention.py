"""Tests attention of a few new tokens per row, which a verification round uses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import fill, grow, init, read_heads
from jsparse.runtime.chunk_attention import attend_chunk, attend_few
from tests.support.tiny import spec_of, tiny_params


@pytest.mark.parametrize(
    ("pooled", "tokens"), [(False, 5), pytest.param(True, 5, marks=pytest.mark.slow), (False, 1)]
)
def test_attention_of_a_few_tokens(pooled, tokens):
    """Against a plain softmax over the visible tokens of each query, and `attend_chunk`."""
    batch, heads, kv_heads, dim = 3, 6, 2, 16
    params = tiny_params(num_heads=heads, num_kv_heads=kv_heads)
    spec = spec_of(params, batch, num_pages=6)._replace(head_dim=dim, num_layers=1)
    if pooled:
        spec = spec._replace(pool_pages=40)
    rng = np.random.default_rng(0)
    lengths, valid = np.array([33, 8, 0]), np.minimum([5, 3, 0], tokens)

    @jax.jit
    def filled(cache, k, v, valid):
        cache = grow(cache, valid, k.shape[1])
        positions = cache.positions[:, None] + jnp.arange(k.shape[1])
        return fill(cache, 0, k, v, positions, valid)

    def kv(count):
        return (rng.standard_normal((batch, count, kv_heads, dim), np.float32) for _ in range(2))

    cache = filled(init(spec), *kv(33), lengths)
    k, v = kv(tokens)
    cache = filled(cache, k, v, valid)
    q = rng.standard_normal((batch, tokens, heads, dim), np.float32)
    reporting = jax.jit(partial(attend_few, stats="page_mass"))
    (got, none), (reported, stats) = (
        run(q, k, v, cache.layers[0], valid) for run in (jax.jit(attend_few), reporting)
    )
    assert none is None
    same = jax.jit(attend_chunk)(q, k, v, cache.layers[0], valid)
    keys, values = (np.asarray(read_heads(x, cache.layers[0])) for x in cache.layers[0].arrays)
    for b in range(batch):
        for t in range(valid[b]):
            for head in range(heads):
                own = head // (heads // kv_heads)
                seen = slice(0, lengths[b] + t + 1)
                logits = keys[b, own, seen] @ q[b, t, head] / np.sqrt(dim)
                weights = np.exp(logits - logits.max())
                expected = weights @ values[b, own, seen] / weights.sum()
                np.testing.assert_allclose(got[b, t, head], expected, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(reported[b, t, head], expected, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(same[b, t, head], expected, rtol=1e-4, atol=1e-5)
    # the report: the pages' weights under the mean of the row's own queries; a single token's are
    # those of a decode step, with itself
    reported_on = lengths + (valid if tokens == 1 else 0)
    mass = np.exp(np.asarray(stats.scores)[:2] - np.asarray(stats.lse)[:2, :, None])
    for b in range(2):
        for own in range(kv_heads):
            mean = q[b, : valid[b]].reshape(valid[b], kv_heads, -1, dim)[:, own].mean((0, 1))
            weights = np.exp(keys[b, own, : reported_on[b]] @ mean / np.sqrt(dim))
            weights = np.pad(weights / weights.sum(), (0, spec.capacity - reported_on[b]))
            by_page = weights.reshape(spec.num_pages, -1).sum(1)
            np.testing.assert_allclose(mass[b, own], by_page, rtol=1e-4, atol=1e-6)
