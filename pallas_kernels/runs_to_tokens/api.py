"""Expands chosen runs of adjacent slots into the list of their slots."""

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
    """Lists the slots of the chosen runs; run i spans [edges[i], edges[i + 1]).

    With lengths, heads also list the slots outside all runs: those before the first edge and those
    from the last edge on. If there are more than `capacity` slots, the last ones are dropped.

    Args:
        ids: indices of the chosen runs, ascending; those past the count are ignored.
        count: the number of runs that each head chooses.
        edges: the boundaries of the runs, ascending; heads may share them. Runs may be empty, and
            adjacent runs may have very different lengths.
        lengths: the number of tokens of each head; None: list only the chosen runs.
        capacity: C.
        implementation: "triton", "reference", or None to choose.

    Returns:
        Token ids, ascending, 0 past the count.

    Raises:
        ValueError: shapes or types do not match, or `capacity` is below 1.
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
