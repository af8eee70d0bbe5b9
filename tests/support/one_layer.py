"""One layer of a cache full of random keys, as a policy sees it right after an append."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, StepView
from jsparse.policy import Policy
from tests.support.tiny import no_constants


@partial(jax.jit, static_argnames=("policy", "spec"))
def _filled(policy: Policy, spec: CacheSpec, k, v):
    """Returns the view of the hooks and the state, with K and V [B, S, K, H] appended."""
    batch, length = k.shape[:2]
    tokens = jnp.zeros((batch, length), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    valid = jnp.full(batch, length, jnp.int32)
    cache = kv_cache.append(kv_cache.init(spec, fields=policy.fields), 0, k, v, positions, valid)
    view = StepView(cache, no_constants(spec))
    return view, policy.append(policy.init(spec), 0, k, v, tokens, positions, view)


@partial(jax.jit, static_argnames=("policy",))
def _selected(policy: Policy, state, q, view):
    return policy.select(state, 0, q, view)[0]


class OneLayer:
    """Queries, K and V of a row of `length` tokens, and a policy that has seen them.

    Attributes:
        q: [B, N, H].
        k: [B, K, S, H], as the cache holds them.
        view, state: of one layer.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        length=45,
        batch=2,
        kv_heads=2,
        group=3,
        head_dim=16,
        page_size=8,
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        self.policy, self.length, self.page_size, self.group = policy, length, page_size, group
        pages = -(-length // page_size) + 1
        spec = CacheSpec(
            1, batch, kv_heads * group, kv_heads, head_dim, page_size, pages, jnp.float32
        )
        k, v = (
            jnp.asarray(rng.normal(size=(batch, length, kv_heads, head_dim)), jnp.float32)
            for _ in "kv"
        )
        self.q = jnp.asarray(3 * rng.normal(size=(batch, kv_heads * group, head_dim)), jnp.float32)
        self.view, self.state = _filled(policy, spec, k, v)
        self.k = np.asarray(k, np.float64).swapaxes(1, 2)

    @property
    def kv(self):
        """The layer's cache."""
        return self.view.layers[0]

    def select(self):
        """The policy's selection."""
        return _selected(self.policy, self.state, self.q, self.view)

    def logits(self, k):
        """The logits of keys [B, K, S, H] for every query head: float64[B, K, G, S]."""
        batch, heads, _, head_dim = k.shape
        q = np.asarray(self.q, np.float64).reshape(batch, heads, self.group, head_dim)
        return np.einsum("bkgh,bksh->bkgs", q, k) / head_dim**0.5
