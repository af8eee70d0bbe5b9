"""Multiplies by a matrix; for a single row, reads the matrix in one launch."""

import math

from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, compute_capability, no_triton, run
from jsparse.pallas_kernels.skinny_product import reference, xla_parts
from jsparse.parts import total

# of a matrix; XLA's kernels keep the memory busy with larger ones
MAX_BYTES = 2**25


def _load_triton():
    from jsparse.pallas_kernels import row_product_triton

    return row_product_triton.row_product


def no_row_product(
    x: Float[Array, "*batch numbers"], matrix: Float[Array, "in out"], *_: object
) -> str | None:
    """Returns why the kernel for one row cannot run here, or None."""
    if math.prod(x.shape[:-1]) != 1:
        return f"takes one row, not {list(x.shape[:-1])}"
    if x.dtype.itemsize != 2:
        return f"takes bfloat16 or float16, not {x.dtype}"
    if matrix.size * matrix.dtype.itemsize > MAX_BYTES:
        return f"takes matrices of at most {MAX_BYTES} bytes, not {list(matrix.shape)}"
    return no_triton()


def _no_parts(
    x: Float[Array, "*batch in"], matrix: Float[Array, "in out"], bias: Float[Array, "out"] | None
) -> str | None:
    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= xla_parts.MAX_ROWS:
        return f"takes 1 to {xla_parts.MAX_ROWS} rows, not {list(x.shape[:-1])}"
    if rows == 1 and x.dtype.itemsize != 2:  # tensor cores might round numbers that XLA does not
        return f"takes one row of bfloat16 or float16, not {x.dtype}"
    if bias is not None:
        return "takes no bias"
    if xla_parts.best_parts(*matrix.shape) == 1:
        return f"has no use for matrices like {list(matrix.shape)}"
    return "needs an NVIDIA GPU" if compute_capability() is None else None


BACKENDS = (
    Backend("triton", _load_triton, no_row_product),
    Backend("parts", lambda: xla_parts.skinny_product, _no_parts),
    Backend("reference", lambda: reference.skinny_product),
)


@checked()
def skinny_product(
    x: Float[Array, "*batch in"],
    matrix: Float[Array, "in out"],
    bias: Float[Array, "out"] | None = None,
    *,
    in_parts: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*parts_and_batch out"]:
    """Returns x · W plus a bias.

    For one row, XLA may write the product of each number to memory before summing, or add partial
    sums in another launch. The kernel reads the matrix once, in one launch. XLA multiplies more
    rows and large matrices, in parts or with its own choice. The kernel has no gradient.

    Args:
        x: the rows.
        matrix: W, of the type of x. Sums are float32, and rounded to that type.
        bias: added to the product, in the type of x.
        in_parts: whether the product may be returned in parts, along a leading axis, for the caller
            to add (jsparse.parts).
        implementation: "triton" (one row, and a matrix of at most 32 MiB with two bytes per
            element), "parts" (1 to 32 rows on a GPU, with a matrix of few columns; a single row
            must have two bytes per element), "reference", or None to choose.

    Raises:
        ValueError: shapes or types do not match, or the named implementation cannot run here.
    """
    check_dtypes(x=x, matrix=matrix, bias=bias)
    y = run("skinny_product", implementation, BACKENDS, x, matrix, bias)
    return y if in_parts else total(y, x.ndim, x.dtype)
