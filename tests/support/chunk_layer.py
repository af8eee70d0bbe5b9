"""Rows of one layer with token boundaries, for policies that choose chunks of text."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, StepView
from jsparse.hooks import PrefillView
from jsparse.policies.expressions import parse
from jsparse.selection.attended import token_mask

PAGE, ROWS, HEADS, GROUP, DIM, VOCAB = 8, 2, 2, 2, 16, 50


def classes(seed=0):
    """Boundary classes and flags of a made-up vocabulary."""
    rng = np.random.default_rng(seed)
    table = np.stack([rng.integers(0, 5, VOCAB), rng.integers(0, 8, VOCAB)], axis=1)
    return {
        name: jnp.asarray(table, jnp.uint8)
        for name in ("boundary_classes", "boundary_classes_or_none")
    }


class Layer:
    """Rows of different lengths in one layer that gets tokens one by one."""

    def __init__(self, policy, prompts, tokens, seed=0, spread=1.0, dtype=jnp.float32, k=None):
        """Draws `tokens` tokens for every row and prefills the prompts; `k` are given keys."""
        self.policy, rng = parse(policy), np.random.default_rng(seed)
        # keys of few directions, so that they form clusters
        centers = rng.normal(size=(12, HEADS, DIM))
        near = centers[rng.integers(0, 12, (ROWS, tokens))]
        drawn = spread * (near + 0.6 * rng.normal(size=near.shape))
        k = jnp.asarray(drawn if k is None else k, dtype)
        self.k = np.asarray(k.astype(jnp.float32))
        self.q = rng.normal(size=(ROWS, tokens, HEADS * GROUP, DIM)).astype(np.float32)
        self.tokens = rng.integers(0, VOCAB, (ROWS, tokens)).astype(np.int32)
        self.lengths, self.steps = np.array(prompts), 0
        spec = CacheSpec(1, ROWS, HEADS * GROUP, HEADS, DIM, PAGE, -(-tokens // PAGE), dtype)
        self.cache, self.state = _read(
            self.policy, spec, self.k, self.tokens, self.lengths, classes()
        )

    def step(self):
        """Appends a token per row; returns the selection and its queries."""
        row = np.arange(ROWS)
        new = (jnp.asarray(x[row, self.lengths]) for x in (self.q, self.k, self.tokens))
        chosen, self.cache, self.state = _step(self.policy, self.cache, self.state, *new, classes())
        q = self.q[row, self.lengths]
        self.lengths, self.steps = self.lengths + 1, self.steps + 1
        return chosen, q

    def slots(self, chosen):
        """The slots in a selection: bool[ROWS, HEADS, S]."""
        lengths = jnp.asarray(self.lengths)[:, None] * jnp.ones(HEADS, jnp.int32)
        pages = self.k.shape[1] // PAGE
        return np.asarray(token_mask(chosen, lengths, num_pages=pages, page_size=PAGE))

    def maintain(self):
        """Runs maintenance if it is due; returns whether it was."""
        if self.steps % self.policy.services.period:
            return False
        self.state, self.cache = _maintain(self.policy, self.state, self.cache)
        return True


@partial(jax.jit, static_argnames=("policy", "spec"))
def _read(policy, spec, k, tokens, lengths, constants):
    cache = kv_cache.init(spec)
    positions = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    cache = kv_cache.append(cache, 0, k, k, positions, lengths)
    none = jnp.zeros((len(k), 0, HEADS * GROUP, DIM))
    step = StepView(cache, constants)
    view = PrefillView(tokens, positions, k, k, lengths, step, none, 0 * lengths, True)
    state = policy.prefill(policy.init(spec), 0, view)
    return cache._replace(positions=lengths), state


@partial(jax.jit, static_argnames=("policy",))
def _step(policy, cache, state, q, k, tokens, constants):
    one = jnp.ones(len(q), jnp.int32)
    at = cache.positions[:, None]
    cache = kv_cache.append(cache, 0, k[:, None], k[:, None], at, one)
    view = StepView(cache, constants)
    k = k[:, None]
    state = policy.append(state, 0, k, k, tokens[:, None], at, view)
    chosen, _, state = policy.select(state, 0, q, view)
    return chosen, cache._replace(positions=cache.positions + 1), state


@partial(jax.jit, static_argnames=("policy",))
def _maintain(policy, state, cache):
    return policy.services.maintain(state, StepView(cache))


def chunks_of(state, row):
    starts, count = np.asarray(state.chunks.starts)[row], int(state.chunks.count[row])
    return list(zip(starts[:count].tolist(), starts[1 : count + 1].tolist(), strict=True))
