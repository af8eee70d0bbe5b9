"""Multiplies rows by the matrices of the experts that a router chose for them."""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.expert_product import reference, xla_blocks


def _load_triton():
    from jsparse.pallas_kernels.expert_product import triton_gpu

    return triton_gpu.expert_product


def _triton_refuses(
    x: Float[Array, "*rows in"], matrices: Float[Array, "E in out"], *_: object, **__: object
) -> str | None:
    if x.dtype.itemsize != 2:
        return f"takes bfloat16 or float16, not {x.dtype}"
    return no_triton() if x.size else "takes at least one row"


BACKENDS = (
    Backend("triton", _load_triton, _triton_refuses),
    Backend("blocks", lambda: xla_blocks.expert_product),
    Backend("reference", lambda: reference.expert_product),
)


@checked(nonempty="E")
def expert_product(
    x: Float[Array, "*rows in"],
    matrices: Float[Array, "E in out"],
    chosen: Int32[Array, "k R"],
    weights: Float32[Array, "k R"] | None = None,
    *,
    gated: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "k R made"]:
    """Returns each row's product with the matrix of each of its k experts.

    Sums are float32. An expert's matrix is read once for all its rows, and those of other experts
    are not read. A row's bits do not depend on other rows if there are few of them.

    Args:
        x: the rows, [R, in] for all of their experts, or a row for each expert, [k, R, in].
        matrices: the experts' matrices, of the type of x.
        chosen: the experts of each row; E and above: none here, whose product is zero.
        weights: factors of the products.
        gated: whether the matrices' columns are gate | up, and silu(gate) · up is returned.
        dtype: the type of the result; None: that of x.
        implementation: "triton" (two bytes per number), "blocks" (XLA, one block of rows of an
            expert at a time), "reference" (a matrix per pair), or None to choose.

    Raises:
        ValueError: shapes or types do not match, or the named implementation cannot run here.
    """
    check_dtypes(x=x, matrices=matrices)
    rows = (*chosen.shape[x.ndim == 2 :], matrices.shape[1])
    if x.shape != rows:
        raise ValueError(f"x.shape={x.shape}: must be {rows} or {(*chosen.shape, rows[-1])}")
    if gated and matrices.shape[2] % 2:
        raise ValueError(f"matrices.shape={matrices.shape}: must be gate | up, of an even number")
    given = x, matrices, chosen, weights
    options = {"gated": gated, "dtype": jax.numpy.dtype(dtype or x.dtype)}
    return run("expert_product", implementation, BACKENDS, *given, **options)
