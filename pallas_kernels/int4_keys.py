"""Int4Keys: a copy of K in 4 bits per channel, paged like K.

int4_append writes it and int4_scores reads it. Quantisation is asymmetric, per token and KV head
over the channels, as in Twilight (Lin et al., arXiv:2502.02770): channel ≈ scale · code + zero,
with code in 0 … 15. It quantises K, or K in the frame of the model's constants
(jsparse.cache.key_constants), in all channels or in selected ones per row and head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Float32, UInt8

from jsparse.cache import CacheSpec, LayerCache
from jsparse.cache.key_constants import KeyFrame, num_spans

LEVELS = 15
FLOAT16_MAX = float(jnp.finfo(jnp.float16).max)


class Int4Keys(NamedTuple):
    """One layer's 4-bit keys, indexed by physical page.

    Attributes:
        packed: two codes per byte, channel 2i in the low half of byte i and channel 2i + 1 in the
            high half. A 16-bit word then has four adjacent codes, and one mask extracts the same
            code of two words at once.
        scale: the step of each token's codes; 1 if all channels are equal.
        zero: the minimum channel of each token.
    """

    packed: UInt8[Array, "pages P bytes"]
    scale: Float16[Array, "pages P"]
    zero: Float16[Array, "pages P"]


def init(spec: CacheSpec) -> Int4Keys:
    """Returns the keys of an empty layer."""
    rows = (spec.pages, spec.page_size)
    packed = jnp.zeros((*rows, spec.head_dim // 2), jnp.uint8)
    return Int4Keys(
        packed, jnp.ones(rows, jnp.float16), jnp.zeros(rows, jnp.float16)
    )  # the code of zeros in `quantise`


def quantise(
    k: Float[Array, "*rows H"],
) -> tuple[UInt8[Array, "*rows H//2"], Float16[Array, "*rows"], Float16[Array, "*rows"]]:
    """Quantises the last axis; returns packed, scale and zero.

    The error of a channel is at most half a step, plus the float16 rounding of scale and zero.
    Channels outside float16's range are clipped, so that everything stored is finite.

    Divisions are written as products with reciprocals because XLA compiles them that way under jit.
    On GPUs XLA's own reciprocal is an ulp off, so a channel halfway between two codes may get
    either.
    """
    if k.shape[-1] % 2:
        raise ValueError(f"k.shape={k.shape}: the last axis must be even, two codes share a byte")
    k = jnp.clip(k.astype(jnp.float32), -FLOAT16_MAX, FLOAT16_MAX)
    # without the barrier XLA may replace the stored minimum by the unrounded one
    zero = jax.lax.optimization_barrier(jnp.min(k, -1).astype(jnp.float16))
    scale = ((jnp.max(k, -1) - jnp.min(k, -1)) * (1 / LEVELS)).astype(jnp.float16)
    scale = jnp.where(scale == 0, jnp.float16(1), scale)
    steps = (k - zero[..., None].astype(jnp.float32)) * (1 / scale.astype(jnp.float32))[..., None]
    codes = jnp.clip(jnp.round(steps), 0, LEVELS).astype(jnp.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale, zero


def dequantise(
    packed: UInt8[Array, "*rows half"],
    scale: Float16[Array, "*rows"],
    zero: Float16[Array, "*rows"],
) -> Float32[Array, "*rows 2*half"]:
    """Returns the channels that the codes represent: the inverse of `quantise` up to rounding."""
    codes = jnp.stack([packed & LEVELS, packed >> 4], axis=-1).reshape(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )
    return codes.astype(jnp.float32) * scale[..., None].astype(jnp.float32) + zero[
        ..., None
    ].astype(jnp.float32)


def check_frame(head_dim: int, layer: LayerCache, frame: KeyFrame | None) -> None:
    """Raises ValueError if the frame's channels or spans differ from the layer's."""
    if frame is None:
        return
    given = frame.key_scale.shape[1], len(frame.angles)
    wanted = head_dim // 2, num_spans(layer)
    if given != wanted:
        raise ValueError(
            "frame: must have {} pairs of channels and {} spans, ".format(*wanted)
            + "not {} and {}".format(*given)
        )
