"""Adds a few new points to groups and moves their centroids."""

from jaxtyping import Array, Float32, Int32

from jsparse.pallas_kernels.centroid_update import reference
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run, wide_rows
from jsparse.pallas_kernels.point_groups import Groups

MAX_NEW = 128  # points per head that the kernel keeps in registers


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

    A group's centroid becomes the mean of all its points, and its radius grows to cover the new
    ones. Groups without new points do not change. The update is in place if the caller donates the
    groups.

    Args:
        groups: the groups so far.
        points: the new points of each head, finite, including unused ones.
        radius: the points' own radii, which extend the groups' radii; None if they have none.
        group: the group that each point joins; groups may be empty.
        nth: the index of each new point among all points of its row, below C, at which `of_point`
            gets its group. Unused points have -1, and their group is ignored.
        normalise: whether centroids are scaled to length 1.
        implementation: "triton", "reference", or None to choose.

    Raises:
        ValueError: shapes or types do not match, or points have radii but groups do not.
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
