"""Defines the decoder's building blocks: RMSNorm, rotary embedding, the gated MLP."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jsparse.models.config import ModelConfig


class RMSNorm(nn.Module):
    """Computes y = x / rms(x) · scale over the last axis.

    The norm is in float32 and cast back before the scale, as the published models do.
    """

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), x.dtype)
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return scale * normed.astype(x.dtype)


class MLP(nn.Module):
    """Computes down(silu(gate(x)) · up(x)).

    gate and up are one matrix, so that a decode step reads it in one product.
    """

    intermediate_size: int

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate, up = jnp.split(
            nn.Dense(
                2 * self.intermediate_size, use_bias=False, param_dtype=x.dtype, name="gate_up"
            )(x),
            2,
            axis=-1,
        )
        return nn.Dense(x.shape[-1], use_bias=False, param_dtype=x.dtype, name="down")(
            nn.silu(gate) * up
        )


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the angle per position of each rotated pair, float32[H/2].

    Llama 3.1's rule (`rope_type: llama3`): pairs whose wavelength exceeds original_max /
    low_freq_factor turn `factor` times slower, those below original_max / high_freq_factor are
    unchanged, and those between are interpolated.
    """
    frequencies = config.rope_theta ** (
        -np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    )
    if config.rope_factors is not None:
        frequencies = frequencies / np.asarray(config.rope_factors)
    if (rule := config.rope_scaling) is not None:
        turns = rule.original_max_position_embeddings * frequencies / (2 * np.pi)
        keep = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        frequencies = frequencies * (keep + (1 - keep) / rule.factor)
    return frequencies.astype(np.float32)


def rope_table(
    positions: Int[Array, "B T"], frequencies: np.ndarray
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """Returns cos and sin of every position's angles, float32, computed once for all layers."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "B T heads H"], table: tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]
) -> Float[Array, "B T heads H"]:
    """Rotates the pairs (x[i], x[i + H/2]), as Hugging Face's weights are laid out, in float32."""
    cos, sin = (t[:, :, None, :] for t in table)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(
        x.dtype
    )
