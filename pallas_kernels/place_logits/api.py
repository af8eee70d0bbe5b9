"""Moves logits from the order in which pages were read to the order of `Stats`."""

from jaxtyping import Array, Float32

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.place_logits import reference
from jsparse.selection import Selection
from jsparse.selection.partials import MeanStatsKind
from jsparse.shapes import Lengths


def _load_triton():
    from jsparse.pallas_kernels.place_logits import triton_gpu

    return triton_gpu.place_logits


BACKENDS = (
    Backend("triton", _load_triton, lambda *_, **__: no_triton()),
    Backend("reference", lambda: reference.place_logits),
)


@checked()
def place_logits(
    logits: Float32[Array, "pairs slots"],
    selection: Selection,
    lengths: Lengths,
    *,
    stats: MeanStatsKind,
    num_pages: int,
    page_size: int,
    by_slot: bool = False,
    implementation: str | None = None,
) -> Float32[Array, "B K units"]:
    """Moves each page's logits, or their logsumexp, to the page's position; the rest is -inf.

    Args:
        logits: P logits for each page that a pair (row, KV head) reads, -inf for unattended tokens.
            Pages are in list order, followed by the newest token's page if the list lacks it; a
            dense head's are in their own order. Later entries are ignored, and all entries of a
            head that reads nothing: an empty head, or one that lists no pages and is not dense.
        selection: the pages that were read, at granularity "page". Lists may extend past a head's
            length.
        lengths: the number of tokens of each head.
        stats: "page_mass" or "token_logits".
        num_pages: M.
        page_size: P.
        by_slot: whether `logits` are [pairs, M·P] in slot order instead. Then logits of tokens that
            are not read, except unattended ones of listed pages, are ignored.
        implementation: "triton", "reference", or None to choose.

    Returns:
        "page_mass": float32[B, K, M]; "token_logits": float32[B, K, M·P].

    Raises:
        ValueError: shapes or granularity do not match, or `stats` is unknown.
    """
    if selection.granularity != "page":
        raise ValueError(
            f"selection.granularity={selection.granularity!r}: place_logits takes 'page'"
        )
    capacity = selection.ids.shape[-1]
    maximum = max(capacity + 1 if capacity else 0, num_pages if selection.dense is not None else 0)
    maximum = num_pages if by_slot else maximum
    if logits.shape[0] != lengths.size or logits.shape[1] % page_size:
        raise ValueError(
            f"logits.shape={logits.shape}: must be [{lengths.size}, a multiple of {page_size}]"
        )
    if logits.shape[1] < maximum * page_size:
        raise ValueError(
            f"logits.shape={logits.shape}: must have room for {maximum} pages of {page_size}"
        )
    return run(
        "place_logits",
        implementation,
        BACKENDS,
        logits,
        selection,
        lengths,
        stats=stats,
        num_pages=num_pages,
        page_size=page_size,
        by_slot=by_slot,
    )
