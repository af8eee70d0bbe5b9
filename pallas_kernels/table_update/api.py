"""Adds a step's attention to tables over position and over distance."""

from jaxtyping import Array, BFloat16, Float32

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, many_heads, no_triton, run
from jsparse.pallas_kernels.table_update import reference
from jsparse.selection.partials import ListedLogits
from jsparse.shapes import Lengths


def _triton():
    from jsparse.pallas_kernels.table_update import triton_gpu

    return triton_gpu.table_update


def _refusal(vertical, distance, listed, lengths, *_, **__) -> str | None:
    return many_heads(lengths.size) or no_triton()


BACKENDS = (
    Backend("triton", _triton, _refusal),
    Backend("reference", lambda: reference.table_update),
)


@checked()
def table_update(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    listed: ListedLogits,
    lengths: Lengths,
    scale: Float32[Array, "B"],
    *,
    sink: int,
    penalty: float = 0.0,
    implementation: str | None = None,
) -> tuple[BFloat16[Array, "B K S"], BFloat16[Array, "B K S"]]:
    """Adds the weights of the attended tokens to both tables, minus a fraction of their mean.

    Only the c listed tokens of a head that are not sinks (id ≥ sink) count. w is the maximum over
    the group of the query heads' weights exp(logits - lse), divided by its sum over these tokens.
    With t = length - 1 the newest slot,
        vertical[i]     += scale · (w_i - penalty / c)
        distance[t - i] += scale · (w_i - penalty / c)
    for each listed i ≥ sink, in float32, rounded once to nearest even. No other entry changes, and
    a head without counted tokens is unchanged. Ids are distinct, so no entry is written twice.

    Args:
        vertical: a number per slot.
        distance: a number per distance from the newest slot.
        listed: the attended tokens and their logits, as attention reports them.
        lengths: the number of tokens of each head, including the newest.
        scale: the factor of each row's additions, by which its tables exceed their true values; at
            least 1 if tables decay.
        sink: the number of first slots that tables ignore; static.
        penalty: the fraction of the mean weight 1 / c that is subtracted from each weight; static.
        implementation: "triton", "reference", or None to choose.

    Returns:
        Both tables. They may reuse the memory of the old ones, which callers should donate.

    Raises:
        ValueError: shapes or types do not match, or `sink` or `penalty` is out of range.
    """
    if type(sink) is not int or sink < 0:
        raise ValueError(f"sink={sink!r}: must be an integer of at least 0")
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 <= penalty < 1:
        raise ValueError(f"penalty={penalty!r}: must be a number from 0 to below 1")
    return run(
        "table_update",
        implementation,
        BACKENDS,
        vertical,
        distance,
        listed,
        lengths,
        scale,
        sink=sink,
        penalty=penalty,
    )
