"""Multiplies with a matrix, and reads it in one launch where there is one row."""

import math

from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, compute_capability, no_triton, run
from jsparse.pallas_kernels.skinny_product import reference, xla_parts
from jsparse.parts import total

# of a matrix; larger ones keep the memory busy in XLA's kernels, too
MAX_BYTES = 2**25


def _load_triton():
    from jsparse.pallas_kernels import row_product_triton

    return row_product_triton.row_product


def no_row_product(
    x: Float[Array, "*batch numbers"], matrix: Float[Array, "in out"], *_: object
) -> str | None:
    """Returns the reason why the kernel for one row cannot run here, or None."""
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
    if rows == 1 and x.dtype.itemsize != 2:  # tensor cores might round what XLA does not
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
    """Returns x · W, and adds a bias to it.

    Of one row XLA may make a product of each number, which it writes to memory, and a sum, or
    parts of a sum, which it adds up in another launch. Here a launch reads the matrix once. More
    rows, and large matrices, are XLA's, in parts or as it likes. The kernel has no gradient.

    Args:
        x: the rows.
        matrix: W, of the type of x. Sums are float32, and rounded to that type.
        bias: what is added then, of the type of x.
        in_parts: whether the product may be left in parts, with an axis of them in front, for the
            caller to add up (jsparse.parts).
        implementation: "triton" (one row and a matrix of at most 32 MiB, of two bytes a number),
            "parts" (1 to 32 rows on a GPU, where the matrix has few columns; one has two bytes a
            number), "reference", or None to pick.

    Raises:
        ValueError: shapes or types do not fit together, or the named implementation cannot run
            here.
    """
    check_dtypes(x=x, matrix=matrix, bias=bias)
    y = run("skinny_product", implementation, BACKENDS, x, matrix, bias)
    return y if in_parts else total(y, x.ndim, x.dtype)
