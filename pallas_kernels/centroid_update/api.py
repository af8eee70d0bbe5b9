"""Adds a few new points to groups, whose centroids move."""

from jaxtyping import Array, Float32, Int32

from jsparse.pallas_kernels.centroid_update import reference
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run, wide_rows
from jsparse.pallas_kernels.point_groups import Groups

MAX_NEW = 128  # points per head that the kernel holds at a time


def _triton():
    from jsparse.pallas_kernels.centroid_update import triton_gpu

    return triton_gpu.centroid_update


def _refused(groups: Groups, points: Array, *_: object, **__: object) -> str | None:
    if points.shape[2] > MAX_NEW:
        return f"takes at most {MAX_NEW} new points per head, not {points.shape[2]}"
    return wide_rows(points.shape[-1]) or no_triton()


BACKENDS = (
    Backend("triton", _triton, _refused),
    Backend("reference", lambda: reference.centroid_update),
)


@checked(nonempty="B K n H")
def centroid_update(
    groups: Groups,
    points: Float32[Array, "B K n H"],
    radius: Float32[Array, "B K n"] | None,
    group: Int32[Array, "B K n"],
    nth: Int32[Array, "B n"],
    *,
    normalise: bool,
    implementation: str | None = None,
) -> Groups:
    """Returns the groups after new points have joined them.

    The centroid of a group that has new points becomes the mean of all its points, and its radius
    is large enough for these wherever they lie. All other groups stay as they are. In place where
    the caller donates the groups.

    Args:
        groups: the groups so far.
        points: the new points of each head, finite, those that are not there included.
        radius: the points' own radii, by which those of the groups grow; None if they have none.
        group: the group that each point joins; groups may be empty.
        nth: the index of each new point among all points of its row, at which `of_point` gets its
            group, below C; the points that are not there have -1, and theirs is not looked at.
        normalise: whether centroids are scaled to length 1.
        implementation: "triton", "reference", or None to pick.

    Raises:
        ValueError: shapes or types do not fit together, or there are radii of points but not of
            groups.
    """
    if radius is not None and groups.radius is None:
        raise ValueError("radius: must be None for groups that have none")
    return run(
        "centroid_update",
        implementation,
        BACKENDS,
        groups,
        points,
        radius,
        group,
        nth,
        normalise=normalise,
    )
