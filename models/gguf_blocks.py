"""Converts GGUF's quantised rows to matrices in blocks, on the device, without rounding.

Source: llama.cpp's `block_q4_0`, `block_q4_K`, `block_q5_0`, `block_q5_K`, `block_q6_K` and
`block_q8_0`. A function per format takes a row's blocks, uint8 [blocks, bytes], and returns its
part of each array.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float16, Int8, UInt8

from jsparse.models.weights import AT_ONCE
from jsparse.pallas_kernels.weight_blocks import (
    BLOCK,
    FORMS,
    SUPER,
    Blocks,
    Form,
    out_axis,
    packed,
)

Row = UInt8[Array, "blocks bytes"]
Parts = dict[str, Array]


def half(two: UInt8[Array, "blocks 2"]) -> Float16[Array, "blocks"]:
    """Returns float16 numbers from their bytes, little-endian."""
    return jax.lax.bitcast_convert_type(two, jnp.float16)


def signed(some: UInt8[Array, "*shape"]) -> Int8[Array, "*shape"]:
    """Returns the signed integers of these bytes."""
    return jax.lax.bitcast_convert_type(some, jnp.int8)


def q8_0(row: Row) -> Parts:
    """Converts Q8_0: a scale, and 32 integers."""
    return {"values": signed(row[:, 2:]), "scales": half(row[:, :2])}


def q4_0(row: Row) -> Parts:
    """Converts Q4_0: a scale, and 32 codes of 4 bits."""
    return packed(nibbles(row[:, 2:], 16), 4) | {"scales": half(row[:, :2])}


def q4_k(row: Row) -> Parts:
    """Converts Q4_K: scales and mins, then codes of 4 bits."""
    return packed(nibbles(row[:, 16:], BLOCK), 4) | scales_and_mins(row)


def q5_0(row: Row) -> Parts:
    """Converts Q5_0: a scale, the fifth bits of codes in order, then their lower 4 bits."""
    above = (row[:, 2:6, None] >> jnp.arange(8, dtype=jnp.uint8) & 1).reshape(len(row), -1)
    return packed(nibbles(row[:, 6:], 16) | above << 4, 5) | {"scales": half(row[:, :2])}


def q5_k(row: Row) -> Parts:
    """Converts Q5_K: scales and mins, the fifth bits of codes, then their lower 4 bits."""
    above = fields(row[:, 16:48], 1)
    return packed(nibbles(row[:, 48:], BLOCK) | above << 4, 5) | scales_and_mins(row)


def q6_k(row: Row) -> Parts:
    """Converts Q6_K: codes' lower 4 bits, their upper 2 bits, then scales."""
    above = fields(row[:, 128:192].reshape(-1, 32), 2).reshape(len(row), SUPER)
    made = packed(nibbles(row[:, :128], 2 * BLOCK) | above << 4, 6)
    return made | {"scales": signed(row[:, 192:208]), "super_scales": half(row[:, 208:])}


def nibbles(some: UInt8[Array, "blocks bytes"], run: int) -> UInt8[Array, "blocks codes"]:
    """Returns the lower 4 bits of `run` bytes, then their upper 4 bits, then those of the next."""
    runs = some.reshape(len(some), -1, 1, run)
    return jnp.concatenate([runs & 15, runs >> 4], 2).reshape(len(some), -1)


def fields(some: UInt8[Array, "blocks 32"], bits: int) -> UInt8[Array, "blocks codes"]:
    """Returns the lowest bits of 32 bytes, then the next bits of these, and so on."""
    at = jnp.arange(0, 8, bits, jnp.uint8)[:, None]
    return (some[:, None] >> at & (1 << bits) - 1).reshape(len(some), -1)


def scales_and_mins(row: Row) -> Parts:
    """Returns the scales and mins of Q4_K and Q5_K: two float16, and 8 integers of 6 bits each."""
    scales, mins, both = row[:, 4:8], row[:, 8:12], row[:, 12:16]
    lower, upper = both & 15, both >> 4
    return {
        "scales": signed(jnp.concatenate([scales & 63, lower | scales >> 6 << 4], 1)),
        "mins": signed(jnp.concatenate([mins & 63, upper | mins >> 6 << 4], 1)),
        "super_scales": half(row[:, :2]),
        "super_mins": half(row[:, 2:4]),
    }


def _converted(of_row: Callable[[Row], Parts], form: Form, arrays: Parts) -> Blocks:
    """Converts a tensor's bytes, uint8 [out, blocks, bytes], some rows at a time."""
    rows = arrays["rows"]
    out, width = len(rows), rows.shape[1] * form.multiple
    count = min(out, max(1, AT_ONCE // width))

    def convert(nth: Array, made: Any) -> Any:
        first = nth * count  # clamped by jax: the last rows may be converted twice
        some = jax.vmap(of_row)(jax.lax.dynamic_slice_in_dim(rows, first, count))
        for name, array in some.items():
            axis, flat = out_axis(name), array.reshape(count, -1)
            part = flat if axis == 0 else flat.T
            made[name] = jax.lax.dynamic_update_slice_in_dim(made[name], part, first, axis)
        return made

    empty = {name: jnp.zeros(x.shape, x.dtype) for name, x in form.arrays(out, width).items()}
    return jax.lax.fori_loop(0, -(-out // count), convert, empty)


CONVERT = {
    of_row.__name__: jax.jit(partial(_converted, of_row, FORMS[of_row.__name__]))
    for of_row in (q4_0, q4_k, q5_0, q5_k, q6_k, q8_0)
}
"""The conversion of a tensor of each format: {"rows": uint8 [out, blocks, bytes]} to `Blocks`."""
