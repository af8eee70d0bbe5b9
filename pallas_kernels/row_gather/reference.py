"""Implements `api.row_gather` in plain jnp: the CPU path and the kernel's oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def row_gather(
    pool: Shaped[Array, "rows *W"],
    ids: Int32[Array, "*lists C"],
    count: Int32[Array, "*lists"] | None,
    *,
    row_axes: int = 1,
) -> Shaped[Array, "*gathered"]:
    """Implements `api.row_gather` in plain jnp.

    XLA gathers only on the device, so a pool in host memory is first copied there as a whole.
    """
    pool = jax.device_put(pool, jax.memory.Space.Device)
    width = pool.shape[row_axes:]
    if ids.size == 0:
        return jnp.zeros((*ids.shape, *width), pool.dtype)
    rows = jnp.take(pool.reshape(-1, *width), ids, axis=0, mode="clip")
    wanted = ids >= 0
    if count is not None:
        wanted &= jnp.arange(ids.shape[-1], dtype=jnp.int32) < count[..., None]
    return jnp.where(
        wanted.reshape(*ids.shape, *(1,) * len(width)), rows, jnp.zeros((), pool.dtype)
    )
