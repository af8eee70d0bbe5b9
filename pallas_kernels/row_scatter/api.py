"""Writes rows, or whole pages, into a pool on the device or in host memory."""

from jaxtyping import Array, Int32, Shaped

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.row_scatter import reference

_COPIED = ("bfloat16", "float16", "float32", "int8", "int16", "int32", "uint8", "uint16", "uint32")


def _triton():
    from jsparse.pallas_kernels.row_scatter import triton_gpu

    return triton_gpu.row_scatter


def _refusal(pool: Array, *_) -> str | None:
    if pool.dtype.name not in _COPIED:
        return f"takes {', '.join(_COPIED)}, not {pool.dtype.name}"
    return no_triton()


BACKENDS = (
    Backend("triton", _triton, _refusal),
    Backend("reference", lambda: reference.row_scatter),
)


@checked()
def row_scatter(
    pool: Shaped[Array, "rows *W"],
    ids: Int32[Array, "*lists"],
    rows: Shaped[Array, "*gathered"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "rows *W"]:
    """Writes rows from device memory to the pool's rows `ids`.

    Args:
        pool: an array with rows along its first axis: [rows, H], or [pages, P, H] with pages as
            rows. It may be in `pinned_host` memory. It is updated in place by a program that
            receives it as a donated argument and returns it in the same memory kind.
        ids: rows in [0, rows), distinct. Any other id writes nothing.
        rows: [*lists, *W], of the pool's type.
        implementation: "triton", "reference", or None to choose.

    Returns:
        The pool with these rows.

    Raises:
        ValueError: shapes or types do not match.
    """
    if pool.ndim < 2:
        raise ValueError(f"pool.shape={pool.shape}: must be [rows, W] or have more axes")
    check_dtypes(pool=pool, rows=rows)
    if rows.shape != (wanted := (*ids.shape, *pool.shape[1:])):
        raise ValueError(f"rows.shape={rows.shape}: must be {wanted}, a row of the pool per id")
    return run("row_scatter", implementation, BACKENDS, pool, ids, rows)
