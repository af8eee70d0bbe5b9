"""Computes the mean and the number of points of each group."""

from jaxtyping import Array, Float, Float32, Int32

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run, wide_rows
from jsparse.pallas_kernels.group_means import reference
from jsparse.shapes import Rows


def _triton():
    from jsparse.pallas_kernels.group_means import triton_gpu

    return triton_gpu.group_means


BACKENDS = (
    Backend("triton", _triton, lambda points, *_, **__: wide_rows(points.shape[-1]) or no_triton()),
    Backend("reference", lambda: reference.group_means),
)


@checked(nonempty="B K C H")
def group_means(
    points: Float[Array, "B K C H"],
    of_point: Int32[Array, "B K C"],
    number: Rows,
    groups: Rows,
    max_groups: int,
    implementation: str | None = None,
) -> tuple[Float32[Array, "B K L H"], Int32[Array, "B K L"]]:
    """Returns the mean of each group's points, and their number.

    Sums are float32, in an order that is always the same.

    Args:
        points: the points of each head, finite.
        of_point: the group of each point, in [0, `groups`).
        number: the number of points of each row; points past it belong to no group.
        groups: the number of groups of each row, at most `max_groups`.
        max_groups: L.
        implementation: "triton", "reference", or None to choose.

    Returns:
        Means and sizes; both are 0 for groups without points.

    Raises:
        ValueError: shapes or types do not match, or `max_groups` is below 1.
    """
    if type(max_groups) is not int or max_groups < 1:
        raise ValueError(f"max_groups={max_groups!r}: must be an integer of at least 1")
    return run(
        "group_means",
        implementation,
        BACKENDS,
        points,
        of_point,
        number,
        groups,
        max_groups=max_groups,
    )
