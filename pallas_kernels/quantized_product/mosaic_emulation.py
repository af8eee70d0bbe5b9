"""Emulates parts of `mosaic_few` that work on registers in plain jnp, for the interpreter."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jsparse.pallas_kernels.quantized_product.mosaic_few_problem import PARTS
from jsparse.pallas_kernels.quantized_product.mosaic_integers import Digits, fixed_point
from jsparse.pallas_kernels.quantized_product.mosaic_shared import ROWS
from jsparse.pallas_kernels.weight_blocks import BLOCK, Form, codes_of, scales_and_offsets


def put_in_fixed_point(
    x: Any, digits_s: Any, units_s: Any, sums_s: Any, first: Any, _: int, form: Digits
) -> None:
    """Emulates `mosaic_integers.put_in_fixed_point`."""
    columns = digits_s.shape[1]
    given = jnp.pad(x[...], ((0, form.padded - x.shape[0]), (0, PARTS[-1] * columns)))
    given = lax.dynamic_slice(given, (0, first), (form.padded, columns))
    digits_s[...], units_s[...], sums = fixed_point(given, form)
    if form.sums:
        sums_s[...] = sums


def block_products(
    values_s: Any, high_s: Any, digits_s: Any, blocks: Sequence[int], bits: int, *, halves: bool
) -> list[Any]:
    """Emulates `mosaic_integers.block_products`."""
    stored: Any = {"values": values_s[...]} | ({} if high_s is None else {"high": high_s[...]})
    codes = codes_of(stored, Form(bits, BLOCK)).astype(jnp.int32) << 8 - bits
    digits, size = digits_s[...].astype(jnp.int32), BLOCK // (1 + halves)
    firsts = (block * BLOCK + at for block in blocks for at in range(0, BLOCK, size))
    return [codes[:, at : at + size] @ digits[:, at : at + size].T for at in firsts]


def add_chunk(
    form: Form, digits: Digits, chunk: dict[str, Any], x: tuple[Any, Any, Any], first: Any, acc: Any
) -> Any:
    """Emulates `mosaic_diagonal.add_chunk`."""
    matrix: Any = {name: ref[...] for name, ref in chunk.items()}
    of_digits, units, sums = (ref[...] for ref in x)
    codes = codes_of(matrix, form).astype(jnp.int32) << 8 - form.bits
    scales, offsets = scales_and_offsets(matrix, form)
    repeats = form.group // digits.segment
    scales = jnp.repeat(scales, repeats, 0)
    if offsets is not None:
        offsets = jnp.repeat(offsets, repeats, 0)
    size = digits.diagonal * digits.segment
    for begin in range(0, codes.shape[1], size):
        own = of_digits[:, begin : begin + size].astype(jnp.int32)
        product = codes[:, begin : begin + size] @ own.T
        product = product.reshape(ROWS, digits.diagonal, digits.padded, 2)
        whole = (256 * product[..., 0] + product[..., 1]).astype(jnp.float32)
        here = begin // digits.segment + jnp.arange(digits.diagonal)  # segments of the chunk
        of_x = first // digits.segment + here
        terms = whole * units[of_x * digits.segment // BLOCK]
        if offsets is not None:
            terms = terms + form.half / digits.sums * sums[of_x]
        terms = terms * scales[here].T[..., None]
        if offsets is not None:
            terms = terms - offsets[here].T[..., None] * sums[of_x] / digits.sums
        acc = acc.at[:, ::2].add(terms.reshape(ROWS, 4))
    return acc


def store(digits: Digits, out: Any, sums: Any) -> None:  # [rows, ROWS], [ROWS, columns]
    """Stores the actual rows of x."""
    if digits.diagonal:
        sums = jnp.sum(sums[:, ::2].reshape(ROWS, digits.diagonal, digits.padded), 1)
    out[...] = sums[:, : out.shape[0]].T
