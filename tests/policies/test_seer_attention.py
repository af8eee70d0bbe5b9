"""SeerAttention-R: its gates and selection against a slow model of the paper; files of gates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, StepView
from jsparse.policies.expressions import parse
from jsparse.policies.seer_attention import seer_attention

LAYERS, HEADS, KV_HEADS, SIZE, PAGE, BLOCK = 2, 6, 2, 8, 4, 8
GROUP, LENGTH = HEADS // KV_HEADS, 45
FREQUENCIES = np.array([1.0, 0.3, 0.05, 0.01])


def rotation(position):
    """RoPE of a position as a matrix; channels i and i + H/2 are a pair."""
    cos, sin = np.cos(FREQUENCIES * position), np.sin(FREQUENCIES * position)
    return np.block([[np.diag(cos), -np.diag(sin)], [np.diag(sin), np.diag(cos)]])


def normed(x, scale):
    """The gates' RMS norm; without scales there is none."""
    return x if scale is None else scale * x / np.sqrt(np.mean(x**2) + 1e-6)


def slow_weights(q, k, w_q, w_k, norms):
    """The softmax of a head's gate over complete blocks before the query's own (section 3).

    q [G, H] and k [T, H] are before RoPE; the query's position is T - 1.
    """
    position = len(k) - 1
    query = rotation(position) @ normed(q.ravel() @ w_q.reshape(-1, SIZE), norms[0])
    logits = []
    for nth in range(position // BLOCK):
        keys = k[nth * BLOCK : (nth + 1) * BLOCK]
        pooled = np.concatenate([keys.max(0), keys.min(0), keys.mean(0)])
        key = rotation(nth * BLOCK) @ normed(pooled @ w_k, norms[1])
        logits.append(query @ key / SIZE**0.5)
    weights = np.exp(np.array(logits) - max(logits))
    return weights / weights.sum()


class Drawn:
    """Random q and k before RoPE, gates, and a cache with K after RoPE, of two rows."""

    def __init__(self, *, normed=True, lengths=(LENGTH, LENGTH - 13), chunks=(20, 4)):
        rng = np.random.default_rng(0)
        self.q = rng.normal(size=(2, HEADS, SIZE)) * 2
        self.k = rng.normal(size=(2, LENGTH, KV_HEADS, SIZE))
        self.w_q = rng.normal(size=(LAYERS, KV_HEADS, GROUP, SIZE, SIZE)) / 4
        self.w_k = rng.normal(size=(LAYERS, KV_HEADS, 3 * SIZE, SIZE)) / 4
        self.norms = rng.uniform(0.5, 2, size=(LAYERS, 2, SIZE)) * normed
        self.lengths, self.chunks = lengths, chunks

    @property
    def constants(self):
        arrays = self.w_q, self.w_k, self.norms, FREQUENCIES
        names = "indexer_q", "indexer_k", "indexer_norms", "rope_frequencies"
        return {n: jnp.asarray(x, jnp.float32) for n, x in zip(names, arrays, strict=True)}

    def select(self, policy, layer=1):
        """Appends the rows in chunks, then one token, and selects; returns lists of pages."""
        pages = -(-LENGTH // PAGE) + 1
        spec = CacheSpec(LAYERS, 2, HEADS, KV_HEADS, SIZE, PAGE, pages, jnp.float32)
        cache, state = kv_cache.init(spec), policy.init(spec)
        k = np.stack([[rotation(t) @ x.T for t, x in enumerate(row)] for row in self.k])
        k = jnp.asarray(k.swapaxes(2, 3), jnp.float32)
        done = np.zeros(2, int)

        @jax.jit
        def append(cache, state, keys, valid):
            view = StepView(cache, self.constants, valid=valid)
            at = view.positions[:, None] + jnp.arange(keys.shape[1])
            cache = kv_cache.append(cache, layer, keys, keys, at, valid)
            view = view._replace(cache=cache)
            state = policy.append(state, layer, keys, keys, at * 0, at, view)
            return cache._replace(positions=cache.positions + valid), state

        for size in (*self.chunks, LENGTH, 1):
            last = 0 if size == 1 else 1
            valid = np.minimum(np.array(self.lengths) - last - done, size)
            at = np.minimum(done[:, None] + np.arange(size), LENGTH - 1)
            keys = jnp.take_along_axis(k, jnp.asarray(at)[..., None, None], axis=1)
            cache, state = append(cache, state, keys, jnp.asarray(valid, jnp.int32))
            done += valid
        np.testing.assert_array_equal(done, self.lengths)
        q = np.stack([x @ rotation(n - 1).T for x, n in zip(self.q, self.lengths, strict=True)])
        view = StepView(cache._replace(positions=cache.positions - 1), self.constants)
        selection, _, _ = jax.jit(lambda s, q, v: policy.select(s, layer, q, v))(
            state, jnp.asarray(q, jnp.float32), view
        )
        ids, count = np.asarray(selection.ids), np.asarray(selection.count)
        return [[ids[b, h, : count[b, h]].tolist() for h in range(KV_HEADS)] for b in range(2)]

    def weights(self, row, head, layer=1):
        norms = self.norms[layer] if self.norms.any() else (None, None)
        q = self.q[row, head * GROUP : (head + 1) * GROUP]
        k = self.k[row, : self.lengths[row], head]
        return slow_weights(q, k, self.w_q[layer, head], self.w_k[layer, head], norms)

    def pages(self, row, blocks):
        """The pages of these blocks and of the newest one that have tokens."""
        newest = (self.lengths[row] - 1) // BLOCK
        every = [b * BLOCK // PAGE + i for b in sorted({*blocks, newest}) for i in range(2)]
        return [page for page in every if page * PAGE < self.lengths[row]]


@pytest.mark.parametrize("normed", [True, False])
def test_budget_selects_the_best_blocks_and_the_newest(normed):
    drawn = Drawn(normed=normed)
    selected = drawn.select(seer_attention(budget=3 * BLOCK, block=BLOCK))
    for row, head in itertools.product(range(2), range(KV_HEADS)):
        best = np.argsort(-drawn.weights(row, head))[:2].tolist()
        assert selected[row][head] == drawn.pages(row, best), (row, head)


@pytest.mark.parametrize("lengths", [(48 - 3, 32), (41, 7)])
def test_threshold_selects_blocks_with_more_weight(lengths):
    """A row whose length ends a block, and one of a single, incomplete block."""
    drawn, theta = Drawn(lengths=lengths, chunks=(4, 3)), 0.21
    selected = drawn.select(seer_attention(threshold=theta, block=BLOCK))
    listed = set()
    for row, head in itertools.product(range(2), range(KV_HEADS)):
        weights = drawn.weights(row, head) if lengths[row] > BLOCK else np.zeros(0)
        assert np.abs(weights - theta).min(initial=1) > 1e-3
        above = np.flatnonzero(weights > theta).tolist()
        listed |= {len(above)}
        assert selected[row][head] == drawn.pages(row, above), (row, head)
    assert len(listed) > 1


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("seer_attention(budget=0)", "budget=0: must be an integer of at least 1"),
        ("seer_attention(threshold=1.0)", "threshold=1.0: must be a number from 0 to below 1"),
        ("seer_attention(block=0)", "block=0: must be an integer of at least 1"),
        ("seer_attention(3)", "gates=3: must be the path of a file"),
        ("seer_attention('nowhere')", "gates='nowhere': must be a safetensors file of an indexer"),
    ],
)
def test_wrong_arguments_are_refused(expression, said):
    with pytest.raises(ValueError, match=said):
        parse(expression)


def test_pages_must_divide_blocks():
    spec = CacheSpec(LAYERS, 2, HEADS, KV_HEADS, SIZE, 16, 4, jnp.float32)
    with pytest.raises(ValueError, match="page_size=16: must divide block=24"):
        seer_attention(block=24).init(spec)
