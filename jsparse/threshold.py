"""Implements top-k and top-p with static shapes.

They bisect a threshold, take what lies above it and compact it to ids, without a sort: 32 passes
over the order-preserving integer image of the float32 scores find the threshold exactly.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32


def top_k_mask(
    scores: Float[Array, "*rows S"], k: Int[Array, "*#rows"] | int
) -> Bool[Array, "*rows S"]:
    """Marks the k largest scores of each row; ties go to the lowest index.

    k may differ from row to row. A row with fewer than k finite scores marks them all; -inf and NaN
    are never marked.
    """
    keys = ordered(scores)
    finite = keys > ordered(jnp.float32(-jnp.inf))
    wanted = jnp.minimum(jnp.asarray(k, jnp.int32), jnp.sum(finite, -1, dtype=jnp.int32))
    kth = _largest(keys, lambda above: jnp.sum(above, -1, dtype=jnp.int32) >= wanted)
    above, ties = keys > kth[..., None], keys == kth[..., None]
    missing = wanted - jnp.sum(above, -1, dtype=jnp.int32)
    return finite & (above | (ties & (jnp.cumsum(ties, -1, dtype=jnp.int32) <= missing[..., None])))


def top_p_mask(
    weights: Float[Array, "*rows S"], p: Float[Array, "*#rows"] | float
) -> Bool[Array, "*rows S"]:
    """Marks the smallest set of each row whose weights sum to at least p times the row's sum.

    Ties go to the lowest index. Weights are non-negative (a softmax, normalised or not). A row with
    any positive weight marks at least one. With p ≥ 1 every positive weight is marked.
    """
    weights = weights.astype(jnp.float32)
    positive = weights > 0
    wanted = jnp.asarray(p, jnp.float32) * jnp.sum(weights, -1)
    keys = ordered(weights)

    def enough(above: Array) -> Array:
        mass = jnp.sum(jnp.where(above, weights, 0.0), -1)
        return (mass >= wanted) & (mass > 0)  # p times the sum can underflow to 0

    least = _largest(keys, enough)
    above, ties = keys > least[..., None], keys == least[..., None]
    missing = wanted - jnp.sum(jnp.where(above, weights, 0.0), -1)
    before = (jnp.cumsum(ties, -1, dtype=jnp.int32) - 1).astype(jnp.float32) * weights
    smallest = above | (ties & ((before < missing[..., None]) | (before == 0)))
    everything = jnp.broadcast_to(jnp.asarray(p, jnp.float32) >= 1.0, wanted.shape)[..., None]
    return positive & (smallest | everything)


def compact(
    mask: Bool[Array, "*rows S"], capacity: int
) -> tuple[Int32[Array, "*rows C"], Int32[Array, "*rows"]]:
    """Returns the indices of the marked entries, ascending, and their number.

    Entries past the count are 0. More than `capacity` marks would be lost: cap them first, by score
    (`top_k_mask`).
    """
    running = jnp.cumsum(mask, -1, dtype=jnp.int32)
    count = jnp.minimum(running[..., -1], capacity)
    nth = jnp.arange(1, capacity + 1, dtype=jnp.int32)
    flat = running.reshape(-1, running.shape[-1])
    ids = jax.vmap(lambda row: jnp.searchsorted(row, nth, side="left", method="scan_unrolled"))(
        flat
    )
    ids = ids.reshape(*mask.shape[:-1], capacity).astype(jnp.int32)
    return jnp.where(nth <= count[..., None], ids, 0), count


def ordered(x: Array) -> UInt32[Array, "..."]:
    """Maps float32 to uint32 in the same order (NaN below everything)."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 and 0 are equal
    key = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(jnp.isnan(x), jnp.uint32(0), key)


def _largest(
    keys: UInt32[Array, "*rows S"], enough: Callable[[Array], Array]
) -> UInt32[Array, "*rows"]:
    """Finds bit by bit the largest threshold t of each row for which enough(keys ≥ t) holds.

    `enough` is monotone.
    """

    def step(i: Array, t: Array) -> Array:
        trial = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(keys >= trial[..., None]), trial, t)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(keys.shape[:-1], jnp.uint32))
