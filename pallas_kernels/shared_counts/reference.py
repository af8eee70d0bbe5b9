"""Implements `api.shared_counts` in plain jnp: the CPU path and the kernel's oracle.

It finds the threshold digit by digit, in 8 passes over the scores; bit by bit would take 32.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jsparse.selection.threshold import ordered
from jsparse.shapes import Lengths, Rows


def shared_counts(
    scores: Float[Array, "B K S"], total: Rows, *, min_count: int, max_count: int
) -> Lengths:
    """Implements `api.shared_counts` in plain jnp."""
    keys = ordered(scores)
    finite = jnp.sum(keys > ordered(jnp.float32(-jnp.inf)), -1, dtype=jnp.int32)
    low, high = jnp.minimum(min_count, finite), jnp.minimum(max_count, finite)

    def allowed(above: Bool[Array, "B K S trials"]) -> Int32[Array, "B K trials"]:
        counts = jnp.sum(above, -2, dtype=jnp.int32)
        return jnp.clip(counts, low[..., None], high[..., None])

    last = jnp.zeros((len(keys), 1), jnp.uint32)  # the largest threshold that enough scores reach
    for shift in range(28, -1, -4):
        trials = last | (jnp.arange(1, 16, dtype=jnp.uint32) << shift)  # [B, 15]
        counts = allowed(keys[..., None] >= trials[:, None, None, :])
        digit = jnp.sum(jnp.sum(counts, -2) >= total[:, None], -1, dtype=jnp.uint32)
        last |= digit[:, None] << shift
    count = allowed((keys > last[..., None])[..., None])[..., 0]
    more = allowed((keys >= last[..., None])[..., None])[..., 0] - count
    missing = jnp.maximum(total - jnp.sum(count, -1), 0)[..., None]
    return count + jnp.clip(missing - (jnp.cumsum(more, -1) - more), 0, more)
