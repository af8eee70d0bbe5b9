"""Products with weight matrices in any format: the code that their kernels share."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import no_triton
from jsparse.pallas_kernels.quantized_product import quantized_product
from jsparse.pallas_kernels.quantized_product.api import (
    check_blocks,
    no_tensor_cores,
    wide_with_small_codes,
)
from jsparse.pallas_kernels.quantized_product.reference import (
    quantized_product as reference_of_blocks,
)
from jsparse.pallas_kernels.skinny_product import skinny_product
from jsparse.pallas_kernels.skinny_product.api import no_row_product
from jsparse.pallas_kernels.weight_blocks import Blocks, form_of

Matrix = Float[Array, "in out"] | Blocks


@checked()
def product(
    x: Float[Array, "*batch in"],
    matrix: Matrix,
    bias: Float[Array, "out"] | None = None,
    *,
    in_parts: bool = False,
) -> Float[Array, "*parts_and_batch out"]:
    """Returns x · W plus a bias, with the op for this kind of matrix.

    Without a bias the product may be left `in_parts`.
    """
    if not isinstance(matrix, Mapping):
        return skinny_product(x, matrix, bias, in_parts=in_parts)
    check_product(matrix, bias, x.shape[-1], x=x)
    y = quantized_product(x, matrix, in_parts=in_parts and bias is None)
    return y if bias is None else y + bias


def plain_product(
    x: Float[Array, "*batch in"], matrix: Matrix, bias: Float[Array, "out"] | None = None
) -> Float[Array, "*batch out"]:
    """Computes `product` in plain jnp."""
    if isinstance(matrix, Mapping):
        rows = math.prod(x.shape[:-1]), x.shape[-1]
        y = reference_of_blocks(x.reshape(rows), matrix, dtype=x.dtype)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
    else:
        y = x @ matrix
    return y if bias is None else y + bias


def check_product(
    matrix: Matrix, bias: Float[Array, "out"] | None, columns: int, **rows: Any
) -> None:
    """Raises ValueError if dtypes differ from the rows', or blocks do not match or fit them."""
    if isinstance(matrix, Mapping):
        check_blocks(matrix, columns)
        check_dtypes(**rows, bias=bias)
    else:
        check_dtypes(**rows, matrix=matrix, bias=bias)


def no_one_launch(x: Float[Array, "*batch numbers"], matrix: Matrix, *_: Any) -> str | None:
    """Returns why no kernel can fuse a product with the op before it here, or None."""
    if not isinstance(matrix, Mapping):
        return no_row_product(x, matrix)
    if math.prod(x.shape[:-1]) != 1:
        return f"takes one row, not {list(x.shape[:-1])}"
    if form_of(matrix).bits < 8 and no_tensor_cores(1, x.dtype, matrix) is None:
        return "takes codes of 8 bits: smaller ones are faster in tensor cores, on their own"
    return wide_with_small_codes(x, matrix) or no_triton()
