"""The steps from new tokens' heads to attention: norms and the rotary embedding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.parts import total
from jsparse.shapes import ChunkKV, ChunkQueries

# cos and sin of the angles at the tokens' positions
RopeTable = tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, "D"], *, eps: float
) -> Float[Array, "*batch D"]:
    """Computes y = x / rms(x) · scale over the last axis.

    The norm is in float32 and cast back before the scale, as the published models do.
    """
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * normed.astype(x.dtype)


def apply_rope(x: Float[Array, "B T heads H"], table: RopeTable) -> Float[Array, "B T heads H"]:
    """Rotates the pairs (x[i], x[i + H/2]), the layout of Hugging Face's weights, in float32."""
    cos, sin = (t[:, :, None, :] for t in table)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(
        x.dtype
    )


class Heads(NamedTuple):
    """q, k and v of new tokens before rotation.

    Attributes:
        qkv: all heads, q's first, then k's and v's; or parts of them to be summed.
        dtype: the type of q, k and v, to which a sum of parts is rounded.
        num_heads: N, the number of query heads.
        table: cos and sin of the tokens' positions.
        scales: the weights of the norms of q's and k's heads; None: no norms.
        eps: epsilon of these norms.
    """

    qkv: Float[Array, "B T heads H"] | Float[Array, "parts B T heads H"]
    dtype: jnp.dtype
    num_heads: int
    table: RopeTable
    scales: tuple[Float[Array, "H"], Float[Array, "H"]] | None
    eps: float

    @property
    def num_kv_heads(self) -> int:
        """K, the number of KV heads."""
        return (self.qkv.shape[-2] - self.num_heads) // 2

    def rotated(self) -> tuple[ChunkQueries, ChunkKV, ChunkKV]:
        """Returns q and k after their norms and rotation, and v."""
        qkv = total(self.qkv, 4, self.dtype)
        q, k, v = jnp.split(qkv, [self.num_heads, self.num_heads + self.num_kv_heads], axis=2)
        if self.scales is not None:
            q, k = (
                rms_norm(x, scale, eps=self.eps)
                for x, scale in zip((q, k), self.scales, strict=True)
            )
        return apply_rope(q, self.table), apply_rope(k, self.table), v
