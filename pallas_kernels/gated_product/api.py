"""Gates what the first half of an MLP made, and multiplies it with a matrix."""

from jaxtyping import Array, Float

from jsparse.pallas_kernels.dispatch import Backend, run
from jsparse.pallas_kernels.gated_product import reference
from jsparse.pallas_kernels.skinny_product import skinny_product
from jsparse.pallas_kernels.skinny_product.api import no_row_product


def _load_triton():
    from functools import partial

    from jsparse.pallas_kernels import row_product_triton

    return partial(row_product_triton.row_product, gated=True)


def _separate(
    gate_up: Float[Array, "*batch two_in"], matrix: Float[Array, "in out"]
) -> Float[Array, "*batch out"]:
    return skinny_product(reference.gated(gate_up), matrix)


BACKENDS = (
    Backend("triton", _load_triton, no_row_product),
    Backend("separate", lambda: _separate),
    Backend("reference", lambda: reference.gated_product),
)


def gated_product(
    gate_up: Float[Array, "*batch two_in"],
    matrix: Float[Array, "in out"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch out"]:
    """Returns (silu(gate) · up) · W.

    The gated row is rounded to its type before it is multiplied. The kernel has no gradient.

    Args:
        gate_up: gate, and behind it up, of a row.
        matrix: W, of the type of gate_up. Sums are float32, and rounded to that type.
        implementation: "triton" (one row and a matrix of at most 32 MiB, of two bytes a number),
            "separate" (`skinny_product` after the gate), "reference", or None to pick.

    Raises:
        ValueError: shapes or types do not fit together, or the named implementation cannot run
            here.
    """
    fits = matrix.ndim == 2 and gate_up.shape[-1:] == (2 * matrix.shape[0],)
    if not fits or gate_up.dtype != matrix.dtype:
        raise ValueError(
            f"matrix={matrix.dtype}{list(matrix.shape)}: must be [in, out] for rows [2 in] of "
            f"gate_up, {gate_up.dtype}{list(gate_up.shape)}"
        )
    return run("gated_product", implementation, BACKENDS, gate_up, matrix)
