"""Scores centroids by the queries of one decode step."""

from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.pallas_kernels.centroid_scores import reference
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run, wide_rows
from jsparse.shapes import Lengths, Queries


def _triton():
    from jsparse.pallas_kernels.centroid_scores import triton_gpu

    return triton_gpu.centroid_scores


def _triton_refuses(q: Array, *_: object, **__: object) -> str | None:
    return wide_rows(q.shape[-1]) or no_triton()


BACKENDS = (
    Backend("triton", _triton, _triton_refuses),
    Backend("reference", lambda: reference.centroid_scores),
)


@checked(nonempty="B K L H U")
def centroid_scores(
    q: Queries,
    centroids: Float[Array, "B K L H"],
    number: Lengths,
    radius: Float32[Array, "B K L"] | None = None,
    unit: Int32[Array, "B K L"] | None = None,
    chosen: Bool[Array, "B K U"] | None = None,
    implementation: str | None = None,
) -> Float32[Array, "B K L"]:
    """Returns the largest q·centroid that the query heads of a KV head have for each centroid.

    With radii it is the largest q·centroid + |q| · radius, which no vector exceeds that lies within
    the radius of the centroid.

    With units, only the centroids of chosen units are read. Of the others four bytes are, those
    that say which unit they belong to, however unevenly units are filled.

    Args:
        q: the queries of one step.
        centroids: the centroids, in K's type; those past a head's number are not looked at.
        number: the number of centroids of each head. Those past it get -inf.
        radius: the radius around each centroid, if any.
        unit: the unit of each centroid, from 0 to U - 1, if there are units.
        chosen: the units whose centroids are scored; those of the others get -inf.
        implementation: "triton", "reference", or None to pick.

    Raises:
        ValueError: shapes or types do not fit together, or of two that go together one is
            missing.
    """
    if (unit is None) != (chosen is None):
        raise ValueError("unit, chosen: must be given together")
    arrays = q, centroids, number, radius, unit, chosen
    return run("centroid_scores", implementation, BACKENDS, *arrays)
