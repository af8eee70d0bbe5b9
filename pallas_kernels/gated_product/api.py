"""Applies an MLP's gate and multiplies the result by a matrix."""

from collections.abc import Mapping

from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, run
from jsparse.pallas_kernels.gated_product import reference
from jsparse.pallas_kernels.linear.api import Matrix, check_product, no_one_launch, product
from jsparse.pallas_kernels.weight_blocks import width_of
from jsparse.parts import total


def _in_one_launch(
    gate_up: Float[Array, "*batch two_in"], matrix: Matrix, bias: Float[Array, "out"] | None = None
) -> Float[Array, "*batch out"]:
    if isinstance(matrix, Mapping):
        from jsparse.pallas_kernels.quantized_product.triton_gpu import gated_product

        return gated_product(gate_up, matrix, bias)
    from jsparse.pallas_kernels.row_product_triton import row_product

    return row_product(gate_up, matrix, bias, gated=True)


def _separate(
    gate_up: Float[Array, "*batch two_in"], matrix: Matrix, bias: Float[Array, "out"] | None = None
) -> Float[Array, "*parts_and_batch out"]:
    return product(reference.gated(gate_up), matrix, bias, in_parts=True)


BACKENDS = (
    Backend("triton", lambda: _in_one_launch, no_one_launch),
    Backend("separate", lambda: _separate),
    Backend("reference", lambda: reference.gated_product),
)


@checked()
def gated_product(
    gate_up: Float[Array, "*batch two_in"],
    matrix: Matrix,
    bias: Float[Array, "out"] | None = None,
    *,
    in_parts: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*parts_and_batch out"]:
    """Returns (silu(gate) · up) · W, plus a bias.

    The gated row is rounded to its type before the product, and quantised for 8-bit blocks as in
    `quantized_product`. The kernel has no gradient.

    Args:
        gate_up: a row's gate, followed by its up projection.
        matrix: W [in, out] in the type of gate_up, or [out, in] in 8-bit blocks.
        bias: added to the product, in the type of gate_up.
        in_parts: whether the product may be returned in parts, along a leading axis, for the caller
            to add (jsparse.parts).
        implementation: "triton" (one row, and either blocks or a matrix of at most 32 MiB with two
            bytes per element), "separate" (the gate, then `skinny_product` or `quantized_product`),
            "reference", or None to choose.

    Raises:
        ValueError: shapes or types do not match, or the named implementation cannot run here.
    """
    width = width_of(matrix) if isinstance(matrix, Mapping) else len(matrix)
    if gate_up.shape[-1] != 2 * width:
        raise ValueError(f"gate_up.shape={gate_up.shape}: the last axis must be 2 · {width}")
    check_product(matrix, bias, width, gate_up=gate_up)
    y = run("gated_product", implementation, BACKENDS, gate_up, matrix, bias)
    return y if in_parts else total(y, gate_up.ndim, gate_up.dtype)
