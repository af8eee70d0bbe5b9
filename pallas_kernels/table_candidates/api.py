"""Lists the slots that two tables of past attention predict for the next step."""

from jaxtyping import Array, BFloat16

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, many_heads, no_triton, run
from jsparse.pallas_kernels.table_candidates import reference
from jsparse.pallas_kernels.table_candidates.rules import Best, CandidateRule, Kurtosis
from jsparse.selection import Selection
from jsparse.shapes import Lengths

MAX_SLOTS = 2**21  # the kernel counts slots in fields of 21 bits


def _triton():
    from jsparse.pallas_kernels.table_candidates import triton_gpu

    return triton_gpu.table_candidates


def _refusal(vertical, distance, lengths, rule: CandidateRule, **_) -> str | None:
    if isinstance(rule, Kurtosis):
        return "takes the rule Best alone"
    if vertical.shape[2] >= MAX_SLOTS:
        return f"takes fewer than {MAX_SLOTS} slots, not {vertical.shape[2]}"
    return many_heads(lengths.size) or no_triton()


BACKENDS = (
    Backend("triton", _triton, _refusal),
    Backend("reference", lambda: reference.table_candidates),
)


@checked()
def table_candidates(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    lengths: Lengths,
    rule: CandidateRule,
    *,
    capacity: int,
    sink: int,
    implementation: str | None = None,
) -> Selection:
    """Lists the slots with a large entry by position or by distance.

    With t = length - 1 the newest slot of a head, slots sink ≤ i < t are ranked by
        score(i) = max(vertical[i], distance[t - i], 0).

    The sinks (i < sink) and the newest slot are always listed, and rank above all slots ranked by
    score: sinks first, oldest first. Ties go to the lowest slot. A common positive factor on all
    entries of a head has no effect.

    A nonempty head lists min(number, capacity, length) slots, at least 1, with `number` given by
    the rule. An empty head lists none.

    Args:
        vertical: a number per slot. Entries below `sink` or from t on are not ranked and are
            ignored; the others must be finite.
        distance: a number per distance from the newest slot. Distances 0 and above t - sink are
            ignored.
        lengths: the number of tokens of each head, at most S; may be 0.
        rule: `Best`, or `Kurtosis`, which runs in plain jnp on every backend.
        capacity: C, at most S.
        sink: the number of first slots that are always listed; static.
        implementation: "triton", "reference", or None to choose.

    Returns:
        Token ids, ascending, 0 past the count.

    Raises:
        ValueError: shapes or types do not match, or `capacity`, `sink` or `rule` is invalid.
    """
    if type(sink) is not int or sink < 0:
        raise ValueError(f"sink={sink!r}: must be an integer of at least 0")
    slots = vertical.shape[2]
    if type(capacity) is not int or not 1 <= capacity <= slots:
        raise ValueError(f"capacity={capacity!r}: must be an integer from 1 to S = {slots}")
    if not isinstance(rule, Best | Kurtosis):
        raise ValueError(f"rule={rule!r}: must be Best or Kurtosis")
    return run(
        "table_candidates",
        implementation,
        BACKENDS,
        vertical,
        distance,
        lengths,
        rule,
        capacity=capacity,
        sink=sink,
    )
