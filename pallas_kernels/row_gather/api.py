"""Gathers rows, or whole pages, of a pool on the device or in host memory."""

from jaxtyping import Array, Int32, Shaped

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.row_gather import reference

_COPIED = ("bfloat16", "float16", "float32", "int8", "int16", "int32", "uint8", "uint16", "uint32")


def _triton():
    from jsparse.pallas_kernels.row_gather import triton_gpu

    return triton_gpu.row_gather


def _refusal(pool: Array, *_, **__) -> str | None:
    if pool.dtype.name not in _COPIED:
        return f"takes {', '.join(_COPIED)}, not {pool.dtype.name}"
    return no_triton()


BACKENDS = (
    Backend("triton", _triton, _refusal),
    Backend("reference", lambda: reference.row_gather),
)


@checked()
def row_gather(
    pool: Shaped[Array, "rows *W"],
    ids: Int32[Array, "*lists C"],
    count: Int32[Array, "*lists"] | None = None,
    *,
    row_axes: int = 1,
    implementation: str | None = None,
) -> Shaped[Array, "*gathered"]:
    """Gathers the listed rows into the device's memory, in the order of their list.

    Args:
        pool: an array with rows along its first `row_axes` axes: [rows, H], or [pages, P, H], whose
            rows are pages, or with row_axes=2 the slots of pages after each other. It may lie in
            `pinned_host` memory: inside jit too, the Triton backend then fetches the listed rows
            over the bus and no others, while the reference copies the whole pool to the device
            first.
        ids: rows in [0, rows). A negative id gives zeros, and nothing is read for it; one that is
            too large gives the last row.
        count: the number of rows that are wanted from each list, the first ones; None is all C. The
            rows of the others are zeros, and nothing is read for them.
        row_axes: the number of the pool's leading axes that count rows.
        implementation: "triton", "reference", or None to pick.

    Returns:
        [*lists, C, *W], of the pool's type.

    Raises:
        ValueError: shapes or types do not fit together.
    """
    if not 1 <= row_axes < max(pool.ndim, 2):
        raise ValueError(f"row_axes={row_axes}: must be at least 1 and leave axes of {pool.shape}")
    if pool.ndim < 2:
        raise ValueError(f"pool.shape={pool.shape}: must be [rows, W] or have more axes")
    if 0 in pool.shape[:row_axes] and ids.size:
        raise ValueError(f"pool.shape={pool.shape}: must have a row where ids lists any")
    return run("row_gather", implementation, BACKENDS, pool, ids, count, row_axes=row_axes)
