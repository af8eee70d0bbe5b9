"""Implements `api.expert_product` with XLA, one block of an expert's rows at a time."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jsparse.pallas_kernels.expert_product.grouping import grouped
from jsparse.pallas_kernels.expert_product.reference import finished

BLOCK = 64  # pairs of a block
FEW = 64  # up to this many pairs, each is a block


def expert_product(
    x: Float[Array, "*rows in"],
    matrices: Float[Array, "E in out"],
    chosen: Int32[Array, "k R"],
    weights: Float32[Array, "k R"] | None = None,
    *,
    gated: bool = False,
    dtype: DTypeLike | None = None,
) -> Float[Array, "k R made"]:
    """Implements `api.expert_product` with XLA; it reads only the matrices of chosen experts."""
    experts, pairs, rows = len(matrices), chosen.size, x.reshape(-1, x.shape[-1])
    if pairs == 0:
        made = matrices.shape[-1] // (1 + gated)
        return jnp.zeros((*chosen.shape, made), dtype or x.dtype)
    size = 1 if pairs <= FEW else BLOCK
    groups = grouped(chosen, experts, size)

    def block(one: tuple[Array, Array]) -> Array:
        of_block, expert = one

        def multiplied() -> Array:
            own = rows.at[of_block % len(rows)].get(mode="clip")
            matrix = matrices[jnp.minimum(expert, experts - 1)]
            return jnp.matmul(own, matrix, preferred_element_type=jnp.float32)

        nothing = jnp.zeros((size, matrices.shape[-1]), jnp.float32)
        return jax.lax.cond(expert < experts, multiplied, lambda: nothing)

    made = jax.lax.map(block, (groups.pairs, groups.experts)).reshape(-1, matrices.shape[-1])
    sums = jnp.zeros((pairs, made.shape[-1]), jnp.float32)
    sums = sums.at[groups.pairs.reshape(-1)].set(made, mode="drop").reshape(*chosen.shape, -1)
    return finished(sums, chosen < experts, weights, gated=gated, dtype=dtype or x.dtype)
