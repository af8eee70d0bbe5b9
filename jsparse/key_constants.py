"""Defines the constants of a model's keys, in whose frame quantised copies of K are kept.

Some models have channels of K that hardly vary and are far from 0: the biases of Qwen2's keys reach
200. A few bits per token would be spent on them. So quantised copies hold what is left when the
mean key is taken off, divided by how far that reaches.

The mean is that of keys before RoPE, rotated to the first position of each page: RoPE turns a
constant channel, and a mean taken behind RoPE holds only near the positions it was taken at. Within
a page a channel of long wavelength hardly turns, and one of short wavelength averages out.

Dot products are the same in the frame, up to rounding:

    q·k = (q · half_range)·((k - R(page)·mid) / half_range) + q·R(page)·mid

The last term is one number per page and query head, `page_terms`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import LayerCache


class KeyConstants(NamedTuple):
    """Holds the constants of all layers.

    Attributes:
        mid: the mean key before RoPE.
        half_range: the reach of k - R(page)·mid in each rotated pair, channels i and i + H/2;
            above 0.
        frequencies: the angle per position of each pair.
    """

    mid: Float32[Array, "L K H"]
    half_range: Float32[Array, "L K H/2"]
    frequencies: Float32[Array, "H/2"]


class KeyFrame(NamedTuple):
    """Holds what an op needs of one layer's constants.

    Attributes:
        mid, half_range: those of the layer.
        angles: the cosines, then the sines, of every pair's angle at the first position of each
            logical page; the same array in all layers.
    """

    mid: Float32[Array, "K H"]
    half_range: Float32[Array, "K H/2"]
    angles: Float32[Array, "M H"]


def frame_of(constants: KeyConstants, layer: int, held: LayerCache) -> KeyFrame:
    """Return the frame of one layer, whose slots must be the tokens' positions."""
    angles = page_angles(constants.frequencies, held.num_pages, held.page_size)
    return KeyFrame(constants.mid[layer], constants.half_range[layer], angles)


def page_angles(
    frequencies: Float32[Array, "H/2"], num_pages: int, page_size: int
) -> Float32[Array, "M H"]:
    """Return cosines and sines of every pair's angle at the first position of each page."""
    first = jnp.arange(num_pages, dtype=jnp.int32) * page_size
    angles = first[:, None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def into_frame(
    k: Float[Array, "B K T H"], frame: KeyFrame, pages: Int32[Array, "B K T"]
) -> Float32[Array, "B K T H"]:
    """Return (k - R(page)·mid) / half_range for keys that lie in these logical pages."""
    cos, sin = jnp.split(frame.angles[pages], 2, axis=-1)
    low, high = jnp.split(frame.mid[:, None], 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return (k.astype(jnp.float32) - rotated) / _by_channel(frame)[:, None]


def scaled_queries(q: Float[Array, "B N H"], frame: KeyFrame) -> Float32[Array, "B N H"]:
    """Return q · half_range, the queries that meet keys in the frame."""
    heads = frame.mid.shape[0]
    grouped = q.astype(jnp.float32).reshape(q.shape[0], heads, -1, q.shape[-1])
    return (grouped * _by_channel(frame)[:, None]).reshape(q.shape)


def page_terms(q: Float[Array, "B N H"], frame: KeyFrame) -> Float32[Array, "B N M"]:
    """Return q·R(page)·mid for all logical pages: what logits lack in the frame, unscaled."""
    heads = frame.mid.shape[0]
    grouped = q.astype(jnp.float32).reshape(q.shape[0], heads, -1, q.shape[-1])
    q_low, q_high = jnp.split(grouped, 2, axis=-1)
    low, high = jnp.split(frame.mid[:, None], 2, axis=-1)
    of_angles = jnp.concatenate([q_low * low + q_high * high, q_high * low - q_low * high], -1)
    return jnp.einsum(
        "bnh,mh->bnm",
        of_angles.reshape(q.shape),
        frame.angles,
        precision=jax.lax.Precision.HIGHEST,
    )


def _by_channel(frame: KeyFrame) -> Float32[Array, "K H"]:
    return jnp.concatenate([frame.half_range, frame.half_range], axis=-1)
