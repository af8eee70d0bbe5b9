"""Multiplies by a matrix in blocks."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_mosaic, no_triton, run
from jsparse.pallas_kernels.quantized_product import reference
from jsparse.pallas_kernels.weight_blocks import Blocks, Form, form_of, width_of
from jsparse.parts import total

# with tensor cores; for more, it is faster to widen the matrix and multiply with XLA
MAX_ROWS = 4096
MAX_FEW_ROWS = 4  # without tensor cores
FASTER_WITHOUT = 1  # maximum rows that are faster without tensor cores, with codes of 8 bits


def _mosaic():
    from jsparse.pallas_kernels.quantized_product import mosaic

    return mosaic.quantized_product


def no_kernel(form: Form, out: int, width: int, dtype: Any) -> str | None:
    """Returns why no kernel multiplies many rows of a dtype by a matrix [out, width], or None."""
    return no_mosaic() or _not_taken(form, out, width, dtype)


def _not_taken(form: Form, out: int, width: int, dtype: Any) -> str | None:
    if dtype != jnp.bfloat16:
        return f"takes bfloat16, not {dtype}"
    # rows of 16 bytes, also of the fifth bits
    multiple = 128 if form.bits == 5 else 64
    if out % 64 or width % multiple:
        return (
            f"takes an output size that 64 divides and a width that {multiple} divides, not {out} "
            f"and {width}"
        )
    return None


def no_tensor_cores(rows: int, dtype: Any, matrix: Blocks) -> str | None:
    """Returns why tensor cores cannot, or should not, multiply rows of a dtype, or None."""
    form, (out, width) = form_of(matrix), (len(matrix["values"]), width_of(matrix))
    least = 1 if form.bits < 8 else FASTER_WITHOUT + 1
    if not least <= rows <= MAX_ROWS:
        return f"takes {least} to {MAX_ROWS} rows, not {rows}"
    if rows <= MAX_FEW_ROWS and form.floats:
        return f"takes more than {MAX_FEW_ROWS} rows of a matrix of floats, not {rows}"
    if rows <= MAX_FEW_ROWS and width % 128:
        return f"takes more than {MAX_FEW_ROWS} rows, or a width that 128 divides, not {width}"
    return _not_taken(form, out, width, dtype) or no_mosaic()


def _no_tensor_cores(x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any) -> str | None:
    return no_tensor_cores(len(x), x.dtype, matrix)


def _triton():
    from jsparse.pallas_kernels.quantized_product import triton_gpu

    return triton_gpu.quantized_product


def _too_many(x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any) -> str | None:
    if not 0 < len(x) <= MAX_FEW_ROWS:
        return f"takes 1 to {MAX_FEW_ROWS} rows, not {len(x)}"
    return wide_with_small_codes(x, matrix) or no_triton()


def wide_with_small_codes(x: Float[Array, "*batch in"], matrix: Blocks) -> str | None:
    """Returns why a product of float32 numbers with a matrix has no kernel, or None."""
    if x.dtype.itemsize > 2 and form_of(matrix).bits < 8:
        return f"takes codes of less than 8 bits with numbers of 16 bits, not {x.dtype}"
    return None


def check_blocks(matrix: Blocks, columns: int) -> None:
    """Raises ValueError if a matrix's arrays do not match, or it has another number of columns."""
    form_of(matrix)
    if (width := width_of(matrix)) != columns:
        raise ValueError(f"matrix has {width} columns: must have {columns}, one per number of x")


BACKENDS = (
    Backend("mosaic", _mosaic, _no_tensor_cores),
    Backend("triton", _triton, _too_many),
    Backend("reference", lambda: reference.quantized_product),
)


@checked()
def quantized_product(
    x: Float[Array, "*batch in"],
    matrix: Blocks,
    *,
    dtype: Any = None,
    in_parts: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*parts_and_batch out"]:
    """Multiplies rows by a matrix in blocks of any format: y = x · Wᵀ.

    Kernels read and multiply blocks directly. For more rows, and on other devices, the matrix is
    first widened to the type of x. A barrier makes XLA wait for x before widening; otherwise it
    would widen all matrices of a model at the start of a program.

    Args:
        x: the rows. Kernels for few rows multiply integers, and convert x to fixed point, block by
            block: to integers of 16 bits, or of 24 in "triton" if x is float32. Most bfloat16
            numbers are unchanged by this. A row with an infinite number gives NaN, and "mosaic" may
            overflow for numbers from 2^108 on if the matrix has mins or factors of its scales.
        matrix: W [out, in], in blocks. For more than 32 rows (16 if the width is above 16,384, 4 if
            it is not divisible by 128 or the codes are floats, 2 above 32,768), "mosaic" rounds its
            numbers to the type of x. For fewer rows, and in "triton", only sums are rounded.
        dtype: the type of the result, by default that of x. Sums are float32.
        in_parts: whether the product may be returned in float32 parts, along a leading axis, for
            the caller to add (jsparse.parts).
        implementation: "mosaic" (Hopper's tensor cores, up to 4096 rows of bfloat16), "triton" (any
            NVIDIA GPU, 1 to 4 rows), "reference", or None to choose.

    Raises:
        ValueError: shapes do not match, or the named implementation cannot run here.
    """
    check_blocks(matrix, x.shape[-1])
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    dtype = x.dtype if dtype is None else dtype
    y = run("quantized_product", implementation, BACKENDS, rows, matrix, dtype=dtype)
    y = y if in_parts else total(y, 2, dtype)
    return y.reshape(*y.shape[:-2], *x.shape[:-1], y.shape[-1])
