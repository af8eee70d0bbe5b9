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
    """Returns each centroid's largest q·centroid over the query heads of its KV head.

    With radii, the score is the largest q·centroid + |q| · radius, an upper bound for all vectors
    within the radius of the centroid.

    With units, only the centroids of chosen units are read. The others cost four bytes each, for
    their unit, however unevenly units are filled.

    Args:
        q: the queries of one step.
        centroids: the centroids, in K's type; those past a head's number are not read.
        number: the number of centroids of each head. Those past it score -inf.
        radius: the radius around each centroid, if any.
        unit: the unit of each centroid, from 0 to U - 1, if there are units.
        chosen: the units to score; centroids of other units score -inf.
        implementation: "triton", "reference", or None to choose.

    Raises:
        ValueError: shapes or types do not match, or only one of `unit` and `chosen` is given.
    """
    if (unit is None) != (chosen is None):
        raise ValueError("unit, chosen: must be given together")
    arrays = q, centroids, number, radius, unit, chosen
    return run("centroid_scores", implementation, BACKENDS, *arrays)
