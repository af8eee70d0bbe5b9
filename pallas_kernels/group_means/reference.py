"""Implements `api.group_means` in plain jnp: the CPU path and the kernel's oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.pallas_kernels.point_blocks import Blocks
from jsparse.shapes import Rows


def group_means(
    points: Float[Array, "B K C H"],
    of_point: Int32[Array, "B K C"],
    number: Rows,
    groups: Rows,
    *,
    max_groups: int,
) -> tuple[Float32[Array, "B K L H"], Int32[Array, "B K L"]]:
    """Implements `api.group_means` in plain jnp, over blocks of points."""
    del groups  # no point is in any group past it
    rows, heads, max_points, width = points.shape
    blocks = Blocks.of(max_points, rows * heads * max_groups)
    nth = jnp.arange(max_groups, dtype=jnp.int32)

    def block(i: Array, sums: Array) -> Array:
        some = blocks.cut(points, i, 2)
        inside = blocks.cut(of_point, i, 2)[..., None] == nth
        inside &= blocks.fresh(i, number)[:, None, :, None]
        # products add in a fixed order; scatters do not
        return sums + jnp.einsum(
            "bkml,bkmh->bklh",
            inside.astype(some.dtype),
            some,
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
        )

    sums = blocks.run(number, block, jnp.zeros((rows, heads, max_groups, width), jnp.float32))
    there = jnp.arange(max_points) < number[:, None]
    row, head = (i[..., None] for i in jnp.indices((rows, heads)))
    sizes = jnp.zeros((rows, heads, max_groups), jnp.int32)
    sizes = sizes.at[row, head, of_point].add(there[:, None].astype(jnp.int32))
    return sums / jnp.maximum(sizes, 1)[..., None], sizes
