"""Turns chosen runs of neighbouring slots into the list of their slots."""

from jaxtyping import Array, Int32

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.runs_to_tokens import reference
from jsparse.selection import Selection
from jsparse.shapes import Lengths


def _triton():
    from jsparse.pallas_kernels.runs_to_tokens import triton_gpu

    return triton_gpu.runs_to_tokens


BACKENDS = (
    Backend("triton", _triton, lambda *_, **__: no_triton()),
    Backend("reference", lambda: reference.runs_to_tokens),
)


@checked(nonempty="B K R")
def runs_to_tokens(
    ids: Int32[Array, "B K R"],
    count: Lengths,
    edges: Int32[Array, "B #K edges"],
    lengths: Lengths | None = None,
    *,
    capacity: int,
    implementation: str | None = None,
) -> Selection:
    """Lists the slots of the chosen runs, of which run i goes from edges[i] to below edges[i + 1].

    With lengths, heads list what lies outside all runs as well: their slots before the first edge
    and those from the last edge on. Where that is more than `capacity` slots, the last are left
    out.

    Args:
        ids: indices of the chosen runs, ascending; those past the count are not looked at.
        count: the number of runs that each head chooses.
        edges: where runs begin and end, ascending; heads may share them. Runs may be empty, and
            runs of very different lengths may stand side by side.
        lengths: the number of slots that each head holds; None lists nothing but the chosen runs.
        capacity: C.
        implementation: "triton", "reference", or None to pick.

    Returns:
        Token ids, ascending, 0 past the count.

    Raises:
        ValueError: shapes or types do not fit together, or `capacity` is below 1.
    """
    if edges.shape[2] < 2:
        raise ValueError(f"edges.shape={edges.shape}: must have at least two edges per head")
    if type(capacity) is not int or capacity < 1:
        raise ValueError(f"capacity={capacity!r}: must be an integer of at least 1")
    return run(
        "runs_to_tokens",
        implementation,
        BACKENDS,
        ids,
        count,
        edges,
        lengths,
        capacity=capacity,
    )
