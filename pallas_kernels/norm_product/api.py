"""Adds to the residual stream, normalises the sum, and multiplies it by a matrix."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, run
from jsparse.pallas_kernels.linear.api import Matrix, check_product, no_one_launch, product
from jsparse.pallas_kernels.norm_product import reference
from jsparse.pallas_kernels.residual_norm import residual_norm
from jsparse.pallas_kernels.residual_norm.api import check_delta
from jsparse.parts import total

MAX_WIDTH = 2**14  # of a matrix in blocks, since a program has all columns


def _in_one_launch(x: Any, delta: Any, scale: Any, matrix: Matrix, *bias: Any, eps: float) -> Any:
    delta = total(delta, x.ndim, x.dtype)
    if isinstance(matrix, Mapping):
        from jsparse.pallas_kernels.quantized_product.triton_gpu import norm_product as of_blocks

        return of_blocks(x, delta, scale, matrix, *bias, eps=eps)
    from jsparse.pallas_kernels.row_product_triton import norm_product as of_matrix

    return of_matrix(x, delta, scale, matrix, *bias, eps=eps)


def _refusal(x: Any, delta: Any, scale: Any, matrix: Matrix, *_: Any, **__: Any) -> str | None:
    if isinstance(matrix, Mapping) and x.shape[-1] > MAX_WIDTH:
        return f"takes blocks of at most {MAX_WIDTH} columns, not {x.shape[-1]}"
    return no_one_launch(x, matrix)


def _separate(
    x: Float[Array, "*batch in"],
    delta: Float[Array, "*parts_and_batch in"],
    scale: Float[Array, "in"],
    matrix: Matrix,
    bias: Float[Array, "out"] | None = None,
    *,
    eps: float,
) -> tuple[Float[Array, "*batch in"], Float[Array, "*parts_and_batch out"]]:
    rows = math.prod(x.shape[:-1]), x.shape[-1]
    parts = delta.shape[: delta.ndim - x.ndim]
    delta = delta.reshape(*parts, *rows)
    whole, normed = residual_norm(x.reshape(rows), delta, scale, eps=eps)
    made = product(normed.reshape(x.shape), matrix, bias, in_parts=True)
    return whole.reshape(x.shape), made


BACKENDS = (
    Backend("triton", lambda: _in_one_launch, _refusal),
    Backend("separate", lambda: _separate),
    Backend("reference", lambda: reference.norm_product),
)


@checked()
def norm_product(
    x: Float[Array, "*batch in"],
    delta: Float[Array, "*parts_and_batch in"],
    scale: Float[Array, "in"],
    matrix: Matrix,
    bias: Float[Array, "out"] | None = None,
    *,
    eps: float,
    in_parts: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch in"], Float[Array, "*parts_and_batch out"]]:
    """Returns x + delta, and norm(x + delta) · W plus a bias: two ops in one launch.

    The ops are `residual_norm`, and `skinny_product` or `quantized_product`. Unlike them, the
    kernel does not round the normalised row to its type before the product. For blocks it rounds
    the row to 16 bits of a block's largest number, as `quantized_product` describes. It has no
    gradient.

    Args:
        x: the residual stream.
        delta: added to x, of the same type; or its parts, as in `residual_norm`.
        scale: the norm's weights.
        matrix: W [in, out] in the type of x, or [out, in] in 8-bit blocks.
        bias: added to the product, in the type of x.
        eps: added to the mean of squares.
        in_parts: whether the product may be returned in parts, along a leading axis, for the caller
            to add (jsparse.parts).
        implementation: "triton" (one row, and either blocks of at most 16,384 columns or a matrix
            of at most 32 MiB with two bytes per element), "separate" (the two ops, each with its
            own choice), "reference", or None to choose.

    Raises:
        ValueError: shapes or types do not match, or the named implementation cannot run here.
    """
    check_product(matrix, bias, x.shape[-1], x=x)
    check_delta(x, delta)
    check_dtypes(x=x, scale=scale)
    given = x, delta, scale, matrix, bias
    whole, y = run("norm_product", implementation, BACKENDS, *given, eps=eps)
    return whole, y if in_parts else total(y, x.ndim, x.dtype)
