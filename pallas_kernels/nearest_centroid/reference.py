"""Implements `api.nearest_centroid` in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jsparse.pallas_kernels.point_blocks import Blocks
from jsparse.shapes import Rows


def nearest_centroid(
    points: Float[Array, "B K C H"],
    centroid: Float[Array, "B K L H"],
    number: Rows,
    groups: Rows,
) -> Int32[Array, "B K C"]:
    """Implements `api.nearest_centroid` in plain jnp, over blocks of points."""
    rows, heads, max_points, _ = points.shape
    blocks = Blocks.of(max_points, rows * heads * centroid.shape[2])
    real = (jnp.arange(centroid.shape[2]) < groups[:, None])[:, None, None]

    def block(i: Array, found: Array) -> Array:
        products = jnp.einsum(
            "bkmh,bklh->bkml",
            blocks.cut(points, i, 2),
            centroid,
            preferred_element_type=jnp.float32,
        )
        nearest = jnp.argmax(jnp.where(real, products, -jnp.inf), axis=-1)
        return blocks.put(found, nearest.astype(jnp.int32), i)

    found = blocks.run(number, block, jnp.zeros((rows, heads, max_points), jnp.int32))
    return jnp.where((jnp.arange(max_points) < number[:, None])[:, None], found, 0)
