"""Counts a row's best scores in each of its lists: the heads' shares of a budget."""

from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.shared_counts import reference
from jsparse.shapes import Lengths, Rows

# One program's registers hold a row and the counts, each thread its own part.
MAX_SCORES, MAX_SLOTS, MAX_LISTS = 36864, 4096, 16


def _load_triton():
    from jsparse.pallas_kernels.shared_counts import triton_gpu

    return triton_gpu.shared_counts


def _triton_refuses(scores: Array, *_: object, **__: object) -> str | None:
    lists, slots = scores.shape[1:]
    padded = 1 << (lists - 1).bit_length()
    if lists > MAX_LISTS:
        return f"takes at most {MAX_LISTS} lists, not {lists}"
    if slots > MAX_SLOTS:
        return f"takes lists of at most {MAX_SLOTS} scores, not {slots}"
    if padded * slots > MAX_SCORES:
        return f"takes at most {MAX_SCORES} scores per row, not {padded} lists of {slots}"
    return no_triton()


BACKENDS = (
    Backend("triton", _load_triton, _triton_refuses),
    Backend("reference", lambda: reference.shared_counts),
)


@checked(nonempty="B K S")
def shared_counts(
    scores: Float[Array, "B K S"],
    total: Rows,
    *,
    min_count: int,
    max_count: int,
    implementation: str | None = None,
) -> Lengths:
    """Counts how a row's `total` best scores are distributed over its K lists.

    A list gets at least `min_count` and at most `max_count`, and never more than its number of
    valid scores. The other lists share the rest. Ties go to the first list. -inf and NaN never
    count.

    Args:
        scores: the lists of each row.
        total: the number of scores that each row's lists get together.
        min_count: the minimum of a list.
        max_count: the maximum of a list.
        implementation: "triton", "reference", or None to choose.

    Raises:
        ValueError: shapes do not match, or `min_count` is negative or above `max_count`.
    """
    if not 0 <= min_count <= max_count:
        raise ValueError(
            f"min_count={min_count}: must be at least 0 and at most max_count={max_count}"
        )
    return run(
        "shared_counts",
        implementation,
        BACKENDS,
        scores,
        total,
        min_count=min_count,
        max_count=max_count,
    )
