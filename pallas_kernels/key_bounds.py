"""Defines PageBounds, the least and greatest value of every channel in every page of K.

bounds_append keeps them up to date and page_bounds reads them. Those in 8 bits can be kept in the
frame of the model's key constants, where no constant channel widens a page's range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, UInt8

from jsparse.cache import CacheSpec, LayerCache
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels import int4_keys

STEPS = 254  # one less than codes have: the last one makes up for what rounding loses
COARSEST = 2.0**-16  # least scale as a part of |zero|, so that float32 tells two codes apart
MIN_MAGNITUDE, MAX_MAGNITUDE = 2.0**-100, 2.0**120  # magnitudes that 8-bit bounds tell apart


class PageBounds(NamedTuple):
    """Holds one layer's bounds, indexed by physical page, in K's dtype.

    The bounds of a page without tokens mean nothing.
    """

    low: Float[Array, "*pages H"]
    high: Float[Array, "*pages H"]

    @classmethod
    def of(cls, low: Float[Array, "*pages H"], high: Float[Array, "*pages H"]) -> "PageBounds":
        """Stores these bounds as they are."""
        return cls(low, high)

    def values(self) -> "PageBounds":
        """Returns the bounds as numbers: themselves."""
        return self


class PageBounds8(NamedTuple):
    """Holds the bounds in 8 bits per channel, rounded outward.

    A page's low and high are scale · code + zero. As float32 computes it, no key up to ±GREATEST is
    outside, whatever its dtype. Keys beyond that count as GREATEST, so that everything stored is
    finite. Numbers nearer to 0 than LEAST, subnormal ones included, count as LEAST away from it.

    Attributes:
        low, high: the codes.
        affine: scale and zero of each page, beside each other: 4 bytes are the fewest that a GPU
            copies asynchronously. Bfloat16 reaches as far as float32 does. Its coarseness makes a
            step longer, by up to 1/128 of it and of |zero| / 254, which is much where all keys of a
            page lie far from 0.
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
        # nearest codes, one further out where those are inside: no error of the division shows
        low_code, high_code = (jnp.floor((end - zero) * (1 / scale) + 0.5) for end in (low, high))
        low_code -= scale * low_code + zero > low
        high_code += scale * high_code + zero < high
        affine = jnp.concatenate([scale, zero], -1).astype(jnp.bfloat16)
        return cls(low_code.astype(jnp.uint8), high_code.astype(jnp.uint8), affine)

    def values(self) -> PageBounds:
        """Returns the bounds as numbers, float32."""
        scale, zero = jnp.split(self.affine.astype(jnp.float32), 2, axis=-1)
        return PageBounds(
            *(scale * codes.astype(jnp.float32) + zero for codes in (self.low, self.high))
        )


Bounds = PageBounds | PageBounds8


def _round_down(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Rounds down to a number that bfloat16 has."""
    # clearing low bits rounds towards 0, so negative numbers are first pushed past the next one
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + ((bits >> 31) & 0xFFFF)) & -0x10000
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def init(spec: CacheSpec, *, form: type[Bounds] = PageBounds) -> Bounds:
    """Makes the bounds of an empty layer."""
    keys = jax.ShapeDtypeStruct((spec.pages, spec.head_dim), spec.dtype)
    return jax.tree.map(
        lambda kept: jnp.zeros(kept.shape, kept.dtype), jax.eval_shape(form.of, keys, keys)
    )


def check_frame(bounds: Bounds, layer: LayerCache, frame: KeyFrame | None) -> None:
    """Raises ValueError where a frame does not fit the layer, or the bounds are not kept in one."""
    if frame is None:
        return
    if isinstance(bounds, PageBounds):
        raise ValueError("frame: must be None with PageBounds, which bound K as it is")
    int4_keys.check_frame(bounds.low.shape[-1], layer, frame)
