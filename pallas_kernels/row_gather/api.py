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
    """Gathers the listed rows into device memory, in list order.

    Args:
        pool: an array with rows along its first `row_axes` axes: [rows, H]; or [pages, P, H] with
            pages as rows; or, with row_axes=2, with the slots of all pages as rows. It may be in
            `pinned_host` memory, also inside jit. The Triton backend then transfers only the listed
            rows over the bus, while the reference first copies the whole pool to the device.
        ids: rows in [0, rows). A negative id gives zeros and reads nothing; an id past the end
            gives the last row.
        count: the number of rows to gather from each list, from its start; None: all C. The rest
            are zeros and read nothing.
        row_axes: the number of leading axes of the pool that count rows.
        implementation: "triton", "reference", or None to choose.

    Returns:
        [*lists, C, *W], of the pool's type.

    Raises:
        ValueError: shapes or types do not match.
    """
    if not 1 <= row_axes <= max(pool.ndim, 1):
        raise ValueError(f"row_axes={row_axes}: must be from 1 to the axes of {pool.shape}")
    if pool.ndim < 2:
        raise ValueError(f"pool.shape={pool.shape}: must be [rows, W] or have more axes")
    if 0 in pool.shape[:row_axes] and ids.size:
        raise ValueError(f"pool.shape={pool.shape}: must have a row where ids lists any")
    return run("row_gather", implementation, BACKENDS, pool, ids, count, row_axes=row_axes)
