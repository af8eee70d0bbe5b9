"""Implements `api.quantized_product` with Mosaic GPU, for Hopper, by the number of rows."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.pallas_kernels.quantized_product.mosaic_few import GROUP, few_rows
from jsparse.pallas_kernels.quantized_product.mosaic_many import many_rows
from jsparse.pallas_kernels.weight_blocks import Blocks

# the rows of x that are multiplied 16 by each reading of the matrix, of which four would take
# longer than one for all
MAX_FEW_ROWS = 48
FEW_COLUMNS = 128  # must divide the width then
MAX_FEW_WIDTH = 28_672  # of which shared memory has room for an eighth of 16 rows


def quantized_product(
    x: Float[Array, "rows in"], matrix: Blocks, *, dtype: Any, **how: Any
) -> Float[Array, "rows out"]:
    """Implements `api.quantized_product` with Mosaic GPU.

    `how` goes to `few_rows` or `many_rows`.
    """
    if not takes_few(x):
        return many_rows(x, matrix, dtype=dtype, **how)
    groups = [x[first : first + GROUP] for first in range(0, len(x), GROUP)]
    return jnp.concatenate([few_rows(group, matrix, **how) for group in groups]).astype(dtype)


def takes_few(x: Float[Array, "rows in"]) -> bool:
    """Returns whether these rows are multiplied with nothing rounded but sums."""
    rows, width = x.shape
    return rows <= MAX_FEW_ROWS and width % FEW_COLUMNS == 0 and width <= MAX_FEW_WIDTH
