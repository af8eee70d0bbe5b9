"""Tests the ring of the newest queries, their pooled attention, and its size beside the cache.

tests/kernels/test_window_attention.py tests the shares themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec
from jsparse.policies.eviction.settings import LayerView
from jsparse.policies.eviction.top_p import in_top_p
from jsparse.policies.eviction.window import as_ring, pooled
from tests.support import slow_eviction as slow
from tests.support.slow_model import softmax

BATCH, HEADS, GROUP, DIM, PAGE, PAGES, SIZE = 2, 2, 3, 16, 8, 7, 5
LENGTHS = np.array([[50, 31], [9, 4]])


def inputs():
    """The newest queries, a layer with biases, and the competing slots."""
    spec = CacheSpec(1, BATCH, HEADS * GROUP, HEADS, DIM, PAGE, PAGES, jnp.float32)
    held = kv_cache.init(spec, fields=("bias",)).layers[0]
    held = held._replace(lengths=jnp.asarray(LENGTHS, jnp.int32))
    slots = np.arange(spec.capacity)
    competing = (slots >= 2) & (slots < LENGTHS[..., None] - 1)
    return jnp.ones((BATCH, SIZE, HEADS * GROUP, DIM)), held, competing


def test_ring_holds_position_p_at_p_modulo_its_size():
    """As the engine's writes of later queries assume."""
    newest = np.arange(2 * 4).reshape(2, 4, 1, 1).astype(np.float32)  # of each row, oldest first
    positions = np.array([9, 3])
    ring = np.asarray(as_ring(jnp.asarray(newest), jnp.asarray(positions, jnp.int32)))
    for row, count in enumerate(positions):
        for age in range(min(4, count)):
            assert ring[row, (count - 1 - age) % 4] == newest[row, 3 - age]


def test_slot_is_marked_if_it_is_in_the_top_p_of_any_query():
    """HARD-KV's public code: each query's softmax covers all tokens of its head up to its own.

    The second row has fewer tokens than the window.
    """
    rng, p, positions = np.random.default_rng(0), 0.7, np.array([70, 4], np.int32)
    _, held, competing = inputs()
    assert held.bias is not None
    keys, bias = (rng.normal(size=x.shape).astype(np.float32) for x in (held.k, held.bias))
    ring = rng.normal(size=(BATCH, SIZE, HEADS * GROUP, DIM)).astype(np.float32)
    lengths = np.array([[50, 31], [4, 4]], np.int32)
    held = held._replace(k=keys, bias=bias, lengths=jnp.asarray(lengths))
    view = LayerView(held, jnp.asarray(competing), jnp.asarray(ring), jnp.asarray(positions), None)
    found = np.asarray(jax.jit(in_top_p, static_argnums=1)(view, p))
    keys, bias = keys.reshape(BATCH, HEADS, -1, DIM), bias.reshape(BATCH, HEADS, -1)
    for row, head in np.ndindex(BATCH, HEADS):
        expected = np.zeros(PAGE * PAGES, bool)
        for age in range(min(SIZE, positions[row])):
            group = ring[row, (positions[row] - 1 - age) % SIZE].reshape(HEADS, GROUP, DIM)[head]
            seen = slice(0, lengths[row, head] - age)
            for query in group:
                logits = (
                    keys[row, head, seen] @ query.astype(np.float64) / 4 + bias[row, head, seen]
                )
                weights = softmax(logits)
                best = np.argsort(-weights)
                expected[best[: slow.num_needed(weights, p)]] = True
        np.testing.assert_array_equal(found[row, head], expected)
    assert found[0].any(-1).all()
    assert (found[0].sum(-1) < LENGTHS[0]).all()


@pytest.mark.parametrize(("width", "pooling"), [(1, "mean"), (3, "max"), (5, "mean")])
def test_pooling_uses_neighbours_and_zeros_past_the_ends(width, pooling):
    scores = np.random.default_rng(0).random((1, 1, 20)).astype(np.float32)
    competing = np.ones(scores.shape, bool)
    competing[..., :4] = competing[..., 17:] = False
    found = np.asarray(pooled(jnp.asarray(scores), jnp.asarray(competing), width, pooling))[0, 0]
    inside, side = np.where(competing, scores, 0.0)[0, 0], width // 2
    padded = np.pad(inside, side)
    how = np.mean if pooling == "mean" else np.max
    for slot in range(4, 17):
        assert found[slot] == pytest.approx(how(padded[slot : slot + width]), rel=1e-5)
