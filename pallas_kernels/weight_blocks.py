"""Matrices in blocks of small integers or floats with scales, as checkpoints store them.

A block is 32 numbers that a product sums over. A number is scale · code - offset. Scales and
offsets belong to groups of 16, 32, 64 or 128 numbers of a row. Sources: llama.cpp's `block_q4_0`,
`block_q4_K`, `block_q5_0`, `block_q5_K`, `block_q6_K` and `block_q8_0`, whose values are kept
exactly.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int, Int8, Shaped, UInt8

BLOCK = 32
SUPER = 256  # numbers of a row with the same factor of their scales
FLOAT8 = jnp.float8_e4m3fn


class Blocks(TypedDict):
    """A matrix [out, in] in blocks of 32 numbers of a row.

    Scales and mins are transposed: a kernel reads those of many rows together.

    Attributes:
        values: codes of 8 bits, int8 or float8 [out, in]; or the lowest 4 bits of smaller ones,
            uint8 [out, in / 2], in which byte i of a block has code i and, above it, code i + 16.
            Codes are signed integers.
        scales: one per group.
        high: the fifth bits of codes, 4 bytes per block, or the fifth and sixth, 8 bytes. Code
            16 h + 4 j + i has bit 2 j + h of byte i, or bits 2 j and 2 j + 1 of byte 4 h + i.
        mins: integers, one per group. Half of the codes' range is added to the codes, and the
            offset is min · scale, or min · super_mins.
        super_scales, super_mins: factors of the scales and mins of 256 numbers.
    """

    values: Shaped[Array, "out value_bytes"]
    scales: Shaped[Array, "groups out"]
    high: NotRequired[UInt8[Array, "out high_bytes"]]
    mins: NotRequired[Int8[Array, "groups out"]]
    super_scales: NotRequired[Float16[Array, "supers out"]]
    super_mins: NotRequired[Float16[Array, "supers out"]]


class Form(NamedTuple):
    """The format of a matrix in blocks.

    Attributes:
        bits: bits of a code.
        group: numbers of a row with the same scale.
        scales: the dtype of scales, int8 if `supers`.
        supers: whether scales and mins have a float16 factor per 256 numbers.
        mins: whether a group has an offset.
        floats: whether codes are float8_e4m3fn instead of integers.
    """

    bits: int
    group: int
    scales: str = "float16"
    supers: bool = False
    mins: bool = False
    floats: bool = False

    @property
    def half(self) -> int:
        """Half of the codes' range: added to codes of matrices with mins."""
        return 1 << self.bits - 1

    @property
    def multiple(self) -> int:
        """The number that must divide a matrix's columns."""
        return SUPER if self.supers else max(self.group, BLOCK)

    def arrays(self, out: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of the arrays of a matrix [out, width]."""
        spec, groups, supers = jax.ShapeDtypeStruct, width // self.group, width // SUPER
        codes = FLOAT8 if self.floats else jnp.int8
        made = {"values": spec((out, width), codes)}
        if self.bits < 8:
            made = {"values": spec((out, width // 2), jnp.uint8)}
        if 4 < self.bits < 8:
            made["high"] = spec((out, width * (self.bits - 4) // 8), jnp.uint8)
        made["scales"] = spec((groups, out), jnp.dtype(self.scales))
        if self.mins:
            made["mins"] = spec((groups, out), jnp.int8)
        if self.supers:
            made["super_scales"] = spec((supers, out), jnp.float16)
        if self.supers and self.mins:
            made["super_mins"] = spec((supers, out), jnp.float16)
        return made

    def nbytes(self, out: int, width: int) -> int:
        """Returns the bytes of a matrix [out, width]."""
        return sum(x.size * x.dtype.itemsize for x in self.arrays(out, width).values())


FORMS = {
    "q4_0": Form(4, 32),
    "q4_k": Form(4, 32, "int8", supers=True, mins=True),
    "q5_0": Form(5, 32),
    "q5_k": Form(5, 32, "int8", supers=True, mins=True),
    "q6_k": Form(6, 16, "int8", supers=True),
    "q8_0": Form(8, 32),
}
"""llama.cpp's formats by name."""


def is_blocks(matrix: Any) -> TypeGuard[Blocks]:
    """Returns whether a matrix is in blocks, or else an array."""
    return isinstance(matrix, Mapping)


def width_of(matrix: Blocks) -> int:
    """Returns the number of columns of a matrix."""
    values = matrix["values"]
    return values.shape[-1] * (2 if values.dtype == jnp.uint8 else 1)


def form_of(matrix: Blocks) -> Form:
    """Returns a matrix's format; raises ValueError if its arrays do not match one."""
    out, width, scales = len(matrix["values"]), width_of(matrix), matrix["scales"]
    bits, high = 8, matrix.get("high")
    if matrix["values"].dtype == jnp.uint8:
        bits = 4 if high is None else 4 + high.shape[-1] * 8 // width
    group, rest = divmod(width, max(len(scales), 1))
    if rest or group not in (16, 32, 64, 128):
        raise ValueError(
            f"matrix: {len(scales)} scales of a row must be one per 16, 32, 64 or 128 of {width} "
            "columns"
        )
    form = Form(
        bits,
        group,
        str(scales.dtype),
        "super_scales" in matrix,
        "mins" in matrix,
        matrix["values"].dtype == FLOAT8,
    )
    types = ("int8",) if form.supers else ("float16", "bfloat16", "float32")
    if form.scales not in types:
        raise ValueError(f"matrix: scales are {form.scales}: must be {' or '.join(types)}")
    for name, spec in form.arrays(out, width).items():
        array = matrix[name]
        if (array.shape, array.dtype) != (spec.shape, spec.dtype) or width % form.multiple:
            raise ValueError(
                f"matrix: {name} is {array.dtype}{list(array.shape)}: must be "
                f"{spec.dtype}{list(spec.shape)} for {width} columns, a multiple of {form.multiple}"
            )
    return form


def rows_of(matrix: Blocks, rows: Int[Array, "n"]) -> Blocks:
    """Returns some rows of a matrix."""
    made: Any = {name: jnp.take(matrix[name], rows, out_axis(name)) for name in matrix}
    return made


def out_axis(name: str) -> int:
    """Returns the axis of the matrix's rows in one of its arrays."""
    return 0 if name in ("values", "high") else 1


def dequantized(matrix: Blocks, dtype: Any) -> Float[Array, "out in"]:
    """Returns the numbers of a matrix, rounded once from float32."""
    form, width = form_of(matrix), width_of(matrix)
    scales, offsets = scales_and_offsets(matrix, form)
    grouped = codes_of(matrix, form).reshape(len(matrix["values"]), -1, form.group)
    numbers = grouped.astype(jnp.float32)
    if offsets is None:
        numbers = numbers * scales.T[..., None]
    else:
        numbers = (numbers + form.half) * scales.T[..., None] - offsets.T[..., None]
    return numbers.reshape(-1, width).astype(dtype)


def scales_and_offsets(
    matrix: Blocks, form: Form
) -> tuple[Float[Array, "groups out"], Float[Array, "groups out"] | None]:
    """Returns each group's scale and offset in float32, in which they are exact.

    The offset is None for matrices without mins.
    """
    wide = {name: jnp.asarray(array).astype(jnp.float32) for name, array in matrix.items()}
    scales, mins = wide["scales"], wide.get("mins")
    if form.supers:
        scales = scales * jnp.repeat(wide["super_scales"], SUPER // form.group, 0)
    if mins is None:
        return scales, None
    if form.supers:
        return scales, mins * jnp.repeat(wide["super_mins"], SUPER // form.group, 0)
    return scales, mins * scales


def codes_of(matrix: Blocks, form: Form) -> Shaped[Array, "out in"]:
    """Returns the codes of a matrix."""
    values, high = matrix["values"], matrix.get("high")
    if form.bits == 8:
        return values
    out, four = len(values), values.reshape(len(values), -1, 1, 16)
    low = jnp.concatenate([four & 15, four >> 4], 2)  # [out, blocks, half, 16]
    if high is not None and form.bits == 5:
        bits = high.reshape(out, -1, 1, 1, 4)
        at = jnp.arange(2)[:, None, None] + 2 * jnp.arange(4)[:, None]
        low = low | ((bits >> at.astype(jnp.uint8)) & 1).reshape(low.shape) << 4
    elif high is not None:
        bits = high.reshape(out, -1, 2, 1, 4)
        at = 2 * jnp.arange(4, dtype=jnp.uint8)[:, None]
        low = low | ((bits >> at) & 3).reshape(low.shape) << 4
    # the highest bit of a code is its sign
    signed = jax.lax.bitcast_convert_type(low << 8 - form.bits, jnp.int8)
    return (signed >> 8 - form.bits).reshape(out, -1)


def packed(codes: UInt8[Array, "out in"], bits: int) -> dict[str, UInt8[Array, "out _"]]:
    """Returns codes of 4, 5 or 6 bits as `values` and `high`.

    They are given as unsigned integers, half of their range above the signed ones.
    """
    out = len(codes)
    halves = (codes ^ (1 << bits - 1)).reshape(out, -1, 2, 16)
    low = halves & 15
    made = {"values": (low[:, :, 0] | low[:, :, 1] << 4).reshape(out, -1)}
    above = (halves >> 4).reshape(out, -1, 2, 4, 4)  # [out, blocks, h, j, i]
    if bits == 5:
        at = jnp.arange(2)[:, None, None] + 2 * jnp.arange(4)[:, None]
        made["high"] = jnp.sum(above << at.astype(jnp.uint8), (2, 3), jnp.uint8).reshape(out, -1)
    elif bits == 6:
        at = 2 * jnp.arange(4, dtype=jnp.uint8)[:, None]
        made["high"] = jnp.sum(above << at, 3, jnp.uint8).reshape(out, -1)
    return made
