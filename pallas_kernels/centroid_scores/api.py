"""Scores centroids by the queries of one decode step."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.pallas_kernels.centroid_scores import reference
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
    if centroids.ndim != 4 or 0 in centroids.shape:
        raise ValueError(f"centroids.shape={centroids.shape}: must be [B, K, L, H], none of them 0")
    batch, heads, clusters, width = centroids.shape
    if q.ndim != 3 or (q.shape[0], q.shape[2]) != (batch, width) or q.shape[1] % heads:
        raise ValueError(
            f"q.shape={q.shape}: must be [{batch}, N, {width}], N a multiple of {heads}"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q.dtype={q.dtype}: must be floating")
    if not jnp.issubdtype(centroids.dtype, jnp.floating):
        raise ValueError(f"centroids.dtype={centroids.dtype}: must be floating")
    if number.shape != (batch, heads) or number.dtype != jnp.int32:
        raise ValueError(f"number={number.dtype}{[*number.shape]}: must be int32[{batch}, {heads}]")
    if radius is not None and (radius.shape, radius.dtype) != (centroids.shape[:3], jnp.float32):
        raise ValueError(
            f"radius={radius.dtype}{[*radius.shape]}: must be float32[{batch}, {heads}, {clusters}]"
        )
    if (unit is None) != (chosen is None):
        raise ValueError("unit, chosen: must be given together")
    if unit is not None and (unit.shape, unit.dtype) != (centroids.shape[:3], jnp.int32):
        raise ValueError(
            f"unit={unit.dtype}{[*unit.shape]}: must be int32[{batch}, {heads}, {clusters}]"
        )
    if chosen is not None and (
        chosen.ndim != 3
        or chosen.shape[:2] != (batch, heads)
        or 0 in chosen.shape
        or chosen.dtype != jnp.bool_
    ):
        raise ValueError(
            f"chosen={chosen.dtype}{[*chosen.shape]}: must be bool[{batch}, {heads}, U], U above 0"
        )
    arrays = q, centroids, number, radius, unit, chosen
    return run("centroid_scores", implementation, BACKENDS, *arrays)
