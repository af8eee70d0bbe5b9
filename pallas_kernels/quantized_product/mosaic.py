"""Implements `api.quantized_product` with Mosaic GPU, for Hopper, by the number of rows."""

from typing import Any

from jaxtyping import Array, Float, Float32

from jsparse.pallas_kernels.quantized_product.mosaic_few import few_rows
from jsparse.pallas_kernels.quantized_product.mosaic_few_problem import GROUPS, group_of
from jsparse.pallas_kernels.quantized_product.mosaic_many import many_rows
from jsparse.pallas_kernels.weight_blocks import Blocks, form_of

FEW_COLUMNS = 128  # divides the width in the kernel for few rows
MAX_FEW = 2**19  # elements of 16 or 32 rows; shared memory has room for an eighth


def quantized_product(
    x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any
) -> Float[Array, "rows out"] | Float32[Array, "parts rows out"]:
    """Implements `api.quantized_product` with Mosaic GPU; few rows return parts."""
    if takes_few(x, matrix):
        return few_rows(x, matrix)
    return many_rows(x, matrix, dtype=dtype)


def takes_few(x: Float[Array, "rows in"], matrix: Blocks) -> bool:
    """Returns whether these rows are multiplied in fixed point, without widening the codes."""
    (rows, width), form = x.shape, form_of(matrix)
    if rows > GROUPS[-1] or width % max(FEW_COLUMNS, form.multiple) or form.floats:
        return False
    return group_of(rows, form) * width <= MAX_FEW
