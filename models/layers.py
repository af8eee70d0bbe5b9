"""The decoder's building blocks: norms, rotary embedding, and the gated MLP."""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jsparse import ranks
from jsparse.heads import RopeTable
from jsparse.models.config import (
    LinearRope,
    Llama3Rope,
    ModelConfig,
    YarnRope,
    yarn_attention_factor,
)
from jsparse.models.linear import Delta, Dense
from jsparse.models.parameters import parameter


class Scale(nn.Module):
    """The weights of an RMSNorm."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self) -> Float[Array, "D"]:
        return parameter(self, "scale", nn.initializers.ones, (self.width,), self.dtype)


class MLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) · up(x)) of the normalised sum, returned with that sum."""

    intermediate_size: int
    eps: float

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        delta: Delta | None,
        scale: Float[Array, "D"],
    ) -> tuple[Float[Array, "B T D"], Delta]:
        of_kind, width = partial(Dense, dtype=x.dtype), x.shape[-1]
        gate_up = of_kind(2 * self.intermediate_size, name="gate_up")(width)
        down = of_kind(width, name="down")(self.intermediate_size)
        x, both = gate_up.after_norm(x, delta, scale, self.eps)
        made = down.after_gate(both, in_parts=ranks.count() == 1)
        return x, ranks.across(made, "sum")


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the angle per position of each rotated pair, float32[H/2].

    `config.rope_scaling` slows pairs down. Linear: all pairs turn `factor` times slower. Llama 3.1:
    pairs with a wavelength above original_max / low_freq_factor turn that much slower, those below
    original_max / high_freq_factor are unchanged, and those between are interpolated. YaRN: the
    same with bounds beta_slow and beta_fast, interpolated over the pairs' indices.
    """
    frequencies = config.rope_theta ** (
        -np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    )
    if config.rope_factors is not None:
        frequencies = frequencies / np.asarray(config.rope_factors)
    if (rule := config.rope_scaling) is not None:
        keep = _kept_share(rule, config, frequencies)
        frequencies = frequencies * (keep + (1 - keep) / rule.factor)
    return frequencies.astype(np.float32)


def _kept_share(
    rule: Llama3Rope | YarnRope | LinearRope, config: ModelConfig, frequencies: np.ndarray
) -> np.ndarray:
    """Returns the fraction of each pair's own frequency that a rule keeps, 0 to 1, float64[H/2]."""
    if isinstance(rule, LinearRope):
        return np.zeros_like(frequencies)
    if isinstance(rule, Llama3Rope):
        turns = rule.original_max_position_embeddings * frequencies / (2 * np.pi)
        keep = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
        return np.clip(keep, 0.0, 1.0)

    def pair_that_turns(times: float) -> float:
        """Solves original_max · theta^(-2·pair / H) = 2π · times for the pair."""
        ratio = rule.original_max_position_embeddings / (2 * math.pi * times)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(rule.beta_fast), pair_that_turns(rule.beta_slow)
    if rule.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The published code limits pairs to H, not to H/2; checkpoints were trained with that.
    first, last = max(first, 0), min(last, config.head_dim - 1)
    width = last - first or 0.001
    return 1 - np.clip((np.arange(len(frequencies)) - first) / width, 0.0, 1.0)


def rope_scale(config: ModelConfig) -> float:
    """Returns the factor of cos and sin: YaRN's attention factor, or 1."""
    rule = config.rope_scaling
    if not isinstance(rule, YarnRope):
        return 1.0
    if rule.attention_factor is not None:
        return rule.attention_factor
    return yarn_attention_factor(rule.factor)


def rope_table(
    positions: Int[Array, "B T"], frequencies: np.ndarray, scale: float = 1.0
) -> RopeTable:
    """Returns scaled cos and sin of every position's angles, float32, once for all layers."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return scale * jnp.cos(angles), scale * jnp.sin(angles)
