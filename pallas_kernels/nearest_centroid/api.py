"""Assigns each point to the centroid with the largest dot product."""

from jaxtyping import Array, Float, Int32

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run, wide_rows
from jsparse.pallas_kernels.nearest_centroid import reference
from jsparse.shapes import Rows


def _triton():
    from jsparse.pallas_kernels.nearest_centroid import triton_gpu

    return triton_gpu.nearest_centroid


BACKENDS = (
    Backend("triton", _triton, lambda points, *_, **__: wide_rows(points.shape[-1]) or no_triton()),
    Backend("reference", lambda: reference.nearest_centroid),
)


@checked(nonempty="B K C L H")
def nearest_centroid(
    points: Float[Array, "B K C H"],
    centroid: Float[Array, "B K L H"],
    number: Rows,
    groups: Rows,
    implementation: str | None = None,
) -> Int32[Array, "B K C"]:
    """Returns the index of the centroid that has the largest dot product with each point.

    For centroids of length 1 that is the nearest by direction. Ties go to the first centroid.
    Products accumulate in float32; those of bfloat16 and float16 are exact.

    Args:
        points: the points of each head, finite.
        centroid: the centroids of each head, finite, in the points' dtype.
        number: the number of points of each row; those past it are not read.
        groups: the number of centroids of each row; those past it are never chosen.
        implementation: "triton", "reference", or None to choose.

    Returns:
        Indices below `groups`; 0 for points past `number`, and if there are no centroids.

    Raises:
        ValueError: shapes or types do not match.
    """
    check_dtypes(points=points, centroid=centroid)
    arrays = points, centroid, number, groups
    return run("nearest_centroid", implementation, BACKENDS, *arrays)
