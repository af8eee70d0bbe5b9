"""The sizes of a small cache that tests fill in every way."""

import jax.numpy as jnp

from jsparse.cache import CacheSpec

B, K, P, M = 2, 2, 4, 3
S = P * M
T = 6  # tokens of a chunk


def small_spec(head_dim: int, num_layers: int = 1) -> CacheSpec:
    """Returns that cache with rows of `head_dim` channels."""
    return CacheSpec(
        num_layers=num_layers,
        batch=B,
        num_heads=4,
        num_kv_heads=K,
        head_dim=head_dim,
        page_size=P,
        num_pages=M,
        dtype=jnp.float32,
    )
