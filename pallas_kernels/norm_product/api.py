"""Adds to the residual stream, normalises the sum and multiplies it with a matrix."""

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

MAX_WIDTH = 2**14  # of a matrix in blocks, of which a program has all columns


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
    """Returns x + delta, and norm(x + delta) · W with a bias added: two ops in a launch.

    They are `residual_norm`, and `skinny_product` or `quantized_product`. The kernel does not round
    what is normalised to its type before it is multiplied, as these do; for blocks it rounds it to
    16 bits of the largest number in a block, as `quantized_product` says. It has no gradient.

    Args:
        x: the residual stream.
        delta: what is added to it, of the same type; or its parts, as `residual_norm` takes them.
        scale: the norm's weights.
        matrix: W [in, out] of the type of x, or [out, in] in 8-bit blocks.
        bias: what is added to the product, of the type of x.
        eps: what is added to the mean of squares.
        in_parts: whether the product may be left in parts, with an axis of them in front, for the
            caller to add up (jsparse.parts).
        implementation: "triton" (one row, and blocks of at most 16,384 columns or a matrix of at
            most 32 MiB of two bytes a number), "separate" (the two ops, each as it picks),
            "reference", or None to pick.

    Raises:
        ValueError: shapes or types do not fit together, or the named implementation cannot run
            here.
    """
    check_product(matrix, bias, x=x)
    check_delta(x, delta)
    check_dtypes(x=x, scale=scale)
    given = x, delta, scale, matrix, bias
    whole, y = run("norm_product", implementation, BACKENDS, *given, eps=eps)
    return whole, y if in_parts else total(y, x.ndim, x.dtype)
