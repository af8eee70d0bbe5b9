"""Expected Attention's scores, against the closed form written with matrices, and its mean."""

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.cache import LayerCache
from jsparse.policies.eviction.settings import LayerView
from jsparse.policies.expected_attention import FUTURE, expected_share, mean_share

HEADS, KV_HEADS, PAGE, SIZE, WINDOW, SINK, LENGTH = 4, 2, 8, 8, 6, 2, 21
FREQUENCIES = np.array([1.0, 0.3, 0.05, 0.01])


def rotation(position: float) -> np.ndarray:
    """RoPE of a position as a matrix; channels i and i + H/2 are a pair."""
    cos, sin = np.cos(FREQUENCIES * position), np.sin(FREQUENCIES * position)
    return np.block([[np.diag(cos), -np.diag(sin)], [np.diag(sin), np.diag(cos)]])


def test_scores_are_the_expected_contributions():
    rng = np.random.default_rng(0)
    before_rope = rng.normal(size=(LENGTH, HEADS, SIZE)) + 2 * rng.normal(size=(HEADS, SIZE))
    k, v = rng.normal(size=(2, KV_HEADS, 3 * PAGE, SIZE))
    ring = np.zeros((1, WINDOW, HEADS, SIZE))
    for position in range(LENGTH - WINDOW, LENGTH):
        ring[0, position % WINDOW] = before_rope[position] @ rotation(position).T
    competing = np.zeros((1, KV_HEADS, 3 * PAGE), bool)
    competing[..., SINK : LENGTH - 3] = True
    kv = LayerCache(
        *(jnp.asarray(x.reshape(-1, PAGE, SIZE), jnp.float32) for x in (k, v)),
        jnp.full((1, KV_HEADS), LENGTH, jnp.int32),
    )
    view = LayerView(
        kv,
        jnp.asarray(competing),
        jnp.asarray(ring, jnp.float32),
        jnp.array([LENGTH]),
        None,
        {"rope_frequencies": jnp.asarray(FREQUENCIES, jnp.float32)},
    )
    scores = np.asarray(jax.jit(expected_share(SINK, 0.02))(view))[0]
    # Devoto et al., section 3: queries q ~ N(mu, Sigma) before RoPE, R the mean of coming rotations
    mean_rotation = np.mean([rotation(LENGTH + nth) for nth in range(FUTURE)], axis=0)
    at = np.flatnonzero(competing[0, 0])
    for kv_head in range(KV_HEADS):
        shares = []
        for head in (2 * kv_head, 2 * kv_head + 1):
            queries = before_rope[LENGTH - WINDOW :, head]
            mu = mean_rotation @ queries.mean(0)
            sigma = mean_rotation @ np.cov(queries.T, bias=True) @ mean_rotation.T
            keys = k[kv_head, at]
            logits = keys @ mu / SIZE**0.5 + np.sum(keys @ sigma * keys, -1) / (2 * SIZE)
            weights = np.exp(logits - logits.max())
            shares.append(weights / weights.sum())
        expected = (np.mean(shares, axis=0) + 0.02) * np.linalg.norm(v[kv_head, at], axis=-1)
        np.testing.assert_allclose(scores[kv_head, at], expected, rtol=1e-4)


def test_expected_weights_are_means_over_gaussian_queries():
    rng = np.random.default_rng(1)
    mean, root = rng.normal(size=SIZE), 0.4 * rng.normal(size=(SIZE, SIZE))
    keys = rng.normal(size=(5, SIZE))
    queries = mean + rng.normal(size=(200_000, SIZE)) @ root.T
    weights = np.mean(np.exp(queries @ keys.T / SIZE**0.5), axis=0)
    found = mean_share(
        jnp.asarray(keys[None, None], jnp.float32),
        jnp.asarray(mean[None, None], jnp.float32),
        jnp.asarray((root @ root.T)[None, None], jnp.float32),
        jnp.ones((1, 1, 5), bool),
    )
    np.testing.assert_allclose(found[0, 0], weights / weights.sum(), rtol=0.02)


def test_queries_of_sinks_and_empty_places_do_not_count():
    """A prompt shorter than the window: only its queries after the sinks."""
    rng = np.random.default_rng(2)
    ring = rng.normal(size=(1, WINDOW, HEADS, SIZE))
    other = ring.copy()
    other[0, :SINK] = 100  # positions 0 and 1 of 4
    other[0, 4:] = 100  # none
    k, v = rng.normal(size=(2, KV_HEADS, PAGE, SIZE))
    found = []
    for queries in (ring, other):
        kv = LayerCache(
            *(jnp.asarray(x, jnp.float32) for x in (k, v)), jnp.full((1, KV_HEADS), 4, jnp.int32)
        )
        constants = {"rope_frequencies": jnp.asarray(FREQUENCIES, jnp.float32)}
        competing = jnp.arange(PAGE) < 3
        rows = jnp.asarray(queries, jnp.float32), jnp.array([4])
        view = LayerView(
            kv, jnp.broadcast_to(competing, (1, KV_HEADS, PAGE)), *rows, None, constants
        )
        found.append(np.asarray(jax.jit(expected_share(SINK, 0.0))(view)))
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert np.isfinite(found[0]).all()
