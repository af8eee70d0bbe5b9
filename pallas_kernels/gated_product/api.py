"""Gates what the first half of an MLP made, and multiplies it with a matrix."""

from collections.abc import Mapping

import jax
from jaxtyping import Array, Float

from jsparse.pallas_kernels.dispatch import Backend, run
from jsparse.pallas_kernels.gated_product import reference
from jsparse.pallas_kernels.linear import Matrix, check_product, no_one_launch, product


def _in_one_launch(
    gate_up: Float[Array, "*batch two_in"], matrix: Matrix
) -> Float[Array, "*batch out"]:
    if isinstance(matrix, Mapping):
        from jsparse.pallas_kernels.quantized_product.triton_gpu import gated_product

        return gated_product(gate_up, matrix)
    from jsparse.pallas_kernels.row_product_triton import row_product

    return row_product(gate_up, matrix, gated=True)


def _separate(gate_up: Float[Array, "*batch two_in"], matrix: Matrix) -> Float[Array, "*batch out"]:
    return product(reference.gated(gate_up), matrix)


BACKENDS = (
    Backend("triton", lambda: _in_one_launch, no_one_launch),
    Backend("separate", lambda: _separate),
    Backend("reference", lambda: reference.gated_product),
)


def gated_product(
    gate_up: Float[Array, "*batch two_in"],
    matrix: Matrix,
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch out"]:
    """Returns (silu(gate) · up) · W.

    The gated row is rounded to its type before it is multiplied. The kernel has no gradient.

    Args:
        gate_up: gate, and behind it up, of a row.
        matrix: W [in, out] of the type of gate_up, or [out, in] in 8-bit blocks.
        implementation: "triton" (one row, and blocks or a matrix of at most 32 MiB of two bytes a
            number), "separate" (`skinny_product` or `quantized_product` after the gate),
            "reference", or None to pick.

    Raises:
        ValueError: shapes or types do not fit together, or the named implementation cannot run
            here.
    """
    blocks = isinstance(matrix, Mapping)
    width = matrix["values"].shape[1] if blocks else matrix.shape[0]
    if gate_up.shape[-1] != 2 * width:
        raise ValueError(
            f"gate_up.shape={gate_up.shape}: the last axis must be gate and up, twice the matrix's "
            f"width, {width}"
        )
    check_product(jax.ShapeDtypeStruct((*gate_up.shape[:-1], width), gate_up.dtype), matrix)
    return run("gated_product", implementation, BACKENDS, gate_up, matrix)
