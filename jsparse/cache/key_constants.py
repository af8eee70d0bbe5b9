"""Constants of a model's keys: the frame in which quantised copies of K are stored.

Some models have channels of K that hardly vary and are far from 0: the biases of Qwen2's keys reach
200. Quantised as they are, they would waste the few bits per token. Quantised copies therefore
     store
keys minus their mean, divided by a scale per rotated pair, channels i and i + H/2. The scale is
√(reach / rms q), with reach the largest of these differences: keys in the frame then have the range
of queries. Scaling queries by s and keys by 1/s, pair by pair, does not change dot products.

The mean is that of keys before RoPE, rotated to the first position of each span of SPAN tokens.
RoPE turns a constant channel, so a mean taken after RoPE holds only near its own positions. Within
a span, a channel of long wavelength hardly turns. In a channel of short wavelength a mean gains
nothing, and none is subtracted.

Dot products are the same in the frame, up to rounding:
    q·k = (q · key_scale)·((k - R(span)·mid) / key_scale) + q·R(span)·mid

The last term is one number per span and query head, `span_terms`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import LayerCache, StepView
from jsparse.ranks import own_part

SPAN = 128  # tokens


class KeyConstants(NamedTuple):
    """The constants of all layers; the fields are their names among a model's constants.

    Attributes:
        key_mid: the mean key before RoPE; 0 in pairs where subtracting it gains little.
        key_scale: the divisor of each pair of k - R(span)·mid; above 0.
        rope_frequencies: the angle per position of each pair.
    """

    key_mid: Float32[Array, "L K H"]
    key_scale: Float32[Array, "L K half"]
    rope_frequencies: Float32[Array, "half"]


# the constants that policies need to store arrays in the frame
KEY_CONSTANTS = KeyConstants._fields


class KeyFrame(NamedTuple):
    """The constants of one layer, in the form that ops use.

    `angles` are the cosines, then the sines, of every pair's angle at the first position of each
    span of a head's slots; the same array in all layers.
    """

    mid: Float32[Array, "K H"]
    key_scale: Float32[Array, "K half"]
    angles: Float32[Array, "spans H"]


def frame_at(view: StepView, layer: int) -> KeyFrame:
    """Returns the frame of one layer; slots must be the tokens' positions."""
    there, layer_cache = view.constants or {}, view.layers[layer]
    if missing := [name for name in KEY_CONSTANTS if name not in there]:
        raise ValueError(
            f"view.constants has {sorted(there)}: must have {missing}, as the policy needs"
        )
    constants = KeyConstants(*(there[name] for name in KEY_CONSTANTS))
    first = jnp.arange(num_spans(layer_cache), dtype=jnp.int32) * SPAN
    angles = angles_at(first, constants.rope_frequencies)
    mid, scale = (own_part(each[layer], 0) for each in constants[:2])
    return KeyFrame(mid, scale, angles)


def num_spans(layer_cache: LayerCache) -> int:
    """Returns the number of spans of a head's slots; the last one may be partial."""
    return -(-layer_cache.capacity // SPAN)


def angles_at(
    positions: Int32[Array, "*n"], frequencies: Float32[Array, "half"]
) -> Float32[Array, "*n 2*half"]:
    """Returns the cosines, then the sines, of every pair's angle at these positions."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def into_frame(
    k: Float[Array, "B K T H"], frame: KeyFrame, slots: Int32[Array, "B K T"]
) -> Float32[Array, "B K T H"]:
    """Returns (k - R(span)·mid) / key_scale for the keys of these slots."""
    mid = rotated(frame.mid[:, None], frame.angles[slots // SPAN])
    return (k.astype(jnp.float32) - mid) / _by_channel(frame)[:, None]


def rotated(
    x: Float[Array, "*#rows H"], angles: Float32[Array, "*#rows H"]
) -> Float32[Array, "*rows H"]:
    """Rotates the pairs (x[i], x[i + H/2]) by angles given as cosines, then sines."""
    cos, sin = jnp.split(angles, 2, axis=-1)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def scaled_queries(q: Float[Array, "B N H"], frame: KeyFrame) -> Float32[Array, "B N H"]:
    """Returns q · key_scale: the queries for keys in the frame."""
    heads = frame.mid.shape[0]
    grouped = q.astype(jnp.float32).reshape(q.shape[0], heads, -1, q.shape[-1])
    return (grouped * _by_channel(frame)[:, None]).reshape(q.shape)


def span_terms(q: Float[Array, "B N H"], frame: KeyFrame) -> Float32[Array, "B N spans"]:
    """Returns q·R(span)·mid for all spans: the term missing from logits in the frame, unscaled."""
    heads = frame.mid.shape[0]
    grouped = q.astype(jnp.float32).reshape(q.shape[0], heads, -1, q.shape[-1])
    q_low, q_high = jnp.split(grouped, 2, axis=-1)
    low, high = jnp.split(frame.mid[:, None], 2, axis=-1)
    of_angles = jnp.concatenate([q_low * low + q_high * high, q_high * low - q_low * high], -1)
    return jnp.einsum(
        "bnh,sh->bns",
        of_angles.reshape(q.shape),
        frame.angles,
        precision=jax.lax.Precision.HIGHEST,
    )


def _by_channel(frame: KeyFrame) -> Float32[Array, "K H"]:
    return jnp.concatenate([frame.key_scale, frame.key_scale], axis=-1)
