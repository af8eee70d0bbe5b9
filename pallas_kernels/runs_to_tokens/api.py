"""Turns chosen runs of neighbouring slots into the list of their slots."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

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


def runs_to_tokens(
    ids: Int32[Array, "B K R"],
    count: Lengths,
    starts: Int32[Array, "B #K n"],
    lengths: Int32[Array, "B #K n"],
    capacity: int,
    *,
    ends: bool = False,
    implementation: str | None = None,
) -> Selection:
    """List the slots of the chosen runs, of which run i holds lengths[i] slots from starts[i] on.

    Runs do not overlap, and starts ascend. Where the chosen ones hold more than `capacity` slots,
    the last are left out.

    Args:
        ids: indices of the chosen runs, ascending; those past the count are not looked at.
        count: the number of runs that each head chooses.
        starts: the first slot of each run; heads may share them, and then the lengths too.
        lengths: the number of slots of each run, 0 or more. Runs of very different lengths may
            stand side by side.
        capacity: C.
        ends: whether every head chooses the first run and the last one as well. Ids are then of the
            runs between these, of which the first is 0.
        implementation: "triton", "reference", or None to pick.

    Returns:
        Token ids, ascending, 0 past the count.

    Raises:
        ValueError: shapes or types do not fit together, there are no two ends, or `capacity` is
            below 1.
    """
    if ids.ndim != 3 or 0 in ids.shape:
        raise ValueError(f"ids.shape={ids.shape}: must be [B, K, R], none of them 0")
    if count.shape != ids.shape[:2]:
        raise ValueError(f"count.shape={count.shape}: must be [B, K] = {ids.shape[:2]}")
    batch, heads, _ = ids.shape
    if starts.ndim != 3 or starts.shape[:2] not in ((batch, heads), (batch, 1)):
        raise ValueError(f"starts.shape={starts.shape}: must be [{batch}, {heads} or 1, n]")
    if starts.shape[2] == 0 or lengths.shape != starts.shape:
        raise ValueError(
            f"lengths.shape={lengths.shape}: must be that of starts, {starts.shape}, with n of at "
            "least 1"
        )
    if ends and starts.shape[2] < 2:
        raise ValueError(f"starts.shape={starts.shape}: must have n of at least 2 with ends=True")
    for name, array in (("ids", ids), ("count", count), ("starts", starts), ("lengths", lengths)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={array.dtype}: must be int32")
    if type(capacity) is not int or capacity < 1:
        raise ValueError(f"capacity={capacity!r}: must be an integer of at least 1")
    return run(
        *("runs_to_tokens", implementation, BACKENDS, ids, count, starts, lengths),
        capacity=capacity,
        ends=ends,
    )
