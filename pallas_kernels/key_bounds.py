"""PageBounds: the minimum and maximum of every channel in every page of K.

bounds_append updates them and page_bounds reads them. 8-bit bounds can be in the frame of the
model's key constants, where constant channels do not widen a page's range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, UInt8

from jsparse.cache import CacheSpec, LayerCache
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels import int4_keys

STEPS = 254  # one less than the number of codes: the last code makes up for rounding
COARSEST = 2.0**-16  # minimum scale relative to |zero|, so that two codes differ in float32
# range of magnitudes that 8-bit bounds distinguish
MIN_MAGNITUDE, MAX_MAGNITUDE = 2.0**-100, 2.0**120


class PageBounds(NamedTuple):
    """One layer's bounds, indexed by physical page, in K's dtype.

    The bounds of a page without tokens are undefined.
    """

    low: Float[Array, "*pages H"]
    high: Float[Array, "*pages H"]

    @classmethod
    def of(cls, low: Float[Array, "*pages H"], high: Float[Array, "*pages H"]) -> "PageBounds":
        """Stores these bounds unchanged."""
        return cls(low, high)

    def values(self) -> "PageBounds":
        """Returns the bounds unchanged."""
        return self


class PageBounds8(NamedTuple):
    """Bounds in 8 bits per channel, rounded outward.

    A page's low and high are scale · code + zero. Computed in float32, they include every key up to
    ±GREATEST, whatever its dtype. Larger keys count as GREATEST, so that everything stored is
    finite. Numbers nearer to 0 than LEAST, including subnormals, count as LEAST away from it.

    Attributes:
        low, high: the codes.
        affine: adjacent scale and zero of each page: 4 bytes are the minimum of an asynchronous
            copy. Bfloat16 has float32's range. Its coarseness makes a step longer, by up to 1/128
            of it and of |zero| / 254, which is much if all keys of a page are far from 0.
    """

    low: UInt8[Array, "*pages H"]
    high: UInt8[Array, "*pages H"]
    affine: BFloat16[Array, "*pages 2"]

    @classmethod
    def of(cls, low: Float[Array, "*pages H"], high: Float[Array, "*pages H"]) -> "PageBounds8":
        """Quantises these bounds."""
        low = jnp.clip(low.astype(jnp.float32), -MAX_MAGNITUDE, MAX_MAGNITUDE) - MIN_MAGNITUDE
        high = jnp.clip(high.astype(jnp.float32), -MAX_MAGNITUDE, MAX_MAGNITUDE) + MIN_MAGNITUDE
        zero = _round_down(jnp.min(low, -1, keepdims=True))
        step = (jnp.max(high, -1, keepdims=True) - zero) * (1 / STEPS)
        scale = -_round_down(-jnp.maximum(step, jnp.abs(zero) * COARSEST))
        # nearest codes, one further out if inside: division errors have no effect
        low_code, high_code = (jnp.floor((end - zero) * (1 / scale) + 0.5) for end in (low, high))
        low_code -= scale * low_code + zero > low
        high_code += scale * high_code + zero < high
        affine = jnp.concatenate([scale, zero], -1).astype(jnp.bfloat16)
        return cls(low_code.astype(jnp.uint8), high_code.astype(jnp.uint8), affine)

    def values(self) -> PageBounds:
        """Returns the bounds as float32 numbers."""
        scale, zero = jnp.split(self.affine.astype(jnp.float32), 2, axis=-1)
        return PageBounds(
            *(scale * codes.astype(jnp.float32) + zero for codes in (self.low, self.high))
        )


Bounds = PageBounds | PageBounds8


def _round_down(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Rounds down to a bfloat16 number."""
    # clearing low bits rounds towards 0, so first move negative numbers past the next one
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + ((bits >> 31) & 0xFFFF)) & -0x10000
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def init(spec: CacheSpec, *, form: type[Bounds] = PageBounds) -> Bounds:
    """Returns the bounds of an empty layer."""
    keys = jax.ShapeDtypeStruct((spec.pages, spec.head_dim), spec.dtype)
    return jax.tree.map(
        lambda kept: jnp.zeros(kept.shape, kept.dtype), jax.eval_shape(form.of, keys, keys)
    )


def check_frame(bounds: Bounds, layer: LayerCache, frame: KeyFrame | None) -> None:
    """Raises ValueError if the frame does not match the layer, or the bounds do not use a frame."""
    if frame is None:
        return
    if isinstance(bounds, PageBounds):
        raise ValueError("frame: must be None with PageBounds, which bound K as it is")
    int4_keys.check_frame(bounds.low.shape[-1], layer, frame)
