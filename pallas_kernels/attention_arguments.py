"""Argument checks shared by the ops that take queries and a cache layer."""

from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.dispatch import MAX_WIDTH, no_triton
from jsparse.selection import MAX_BITS_PAGE, Selection

_TYPES = ("bfloat16", "float16", "float32")


def check_list(op: str, granularity: str, layer: LayerCache, selection: Selection) -> None:
    """Raises ValueError if an op cannot read a selection of this layer."""
    if selection.granularity != granularity:
        raise ValueError(f"granularity={selection.granularity!r}: {op} takes {granularity!r}")
    if selection.bits is not None and layer.page_size > MAX_BITS_PAGE:
        raise ValueError(
            f"page_size={layer.page_size}: must be at most {MAX_BITS_PAGE} where pages carry token "
            "bits"
        )


def no_rows(q: Float[Array, "B N H"], layer: LayerCache, *, max_group: int) -> str | None:
    """Returns why the Triton kernels that attend to rows of K and V cannot run here, or None."""
    types = {array.dtype.name for array in (q, layer.k, layer.v)}
    if len(types) > 1 or types.isdisjoint(_TYPES):
        return (
            f"takes q, K and V of one type of {', '.join(_TYPES)}, not {', '.join(sorted(types))}"
        )
    group, head_dim = q.shape[1] // layer.lengths.shape[1], q.shape[2]
    if head_dim > MAX_WIDTH or head_dim % 8:
        return f"takes head dimensions up to {MAX_WIDTH} that are multiples of 8, not {head_dim}"
    if group > max_group:
        kind = f"of {head_dim} channels in {q.dtype}"
        return f"takes at most {max_group} query heads {kind} per KV head, not {group}"
    return no_triton()
