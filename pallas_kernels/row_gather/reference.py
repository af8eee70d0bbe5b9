"""Implements `api.row_gather` in plain jnp, as CPU path and oracle of the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def row_gather(
    pool: Shaped[Array, "rows *W"],
    ids: Int32[Array, "*lists C"],
    count: Int32[Array, "*lists"] | None,
) -> Shaped[Array, "*gathered"]:
    """Implement `api.row_gather` in plain jnp.

    XLA gathers on the device alone, so a pool in host memory is copied there whole.
    """
    pool = jax.device_put(pool, jax.memory.Space.Device)
    if ids.size == 0:
        return jnp.zeros((*ids.shape, *pool.shape[1:]), pool.dtype)
    rows = jnp.take(pool, ids, axis=0, mode="clip")
    if count is None:
        return rows
    wanted = jnp.arange(ids.shape[-1], dtype=jnp.int32) < count[..., None]
    return jnp.where(
        wanted.reshape(*ids.shape, *(1,) * (pool.ndim - 1)), rows, jnp.zeros((), pool.dtype)
    )
