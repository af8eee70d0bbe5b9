"""Checks the arguments that ops on queries and a layer of the cache have in common."""

from typing import get_args

from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.dispatch import MAX_WIDTH, no_triton
from jsparse.partials import StatsKind
from jsparse.selection import MAX_BITS_PAGE, Selection

_TYPES = ("bfloat16", "float16", "float32")


def check_shapes(
    op: str,
    granularity: str,
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    head_dim: int | None = None,
) -> None:
    """Raises ValueError where queries, keys, cache and selection do not fit together.

    `head_dim` is that of the op's own keys, or None if the op reads the cache's.
    """
    if q.ndim != 3:
        raise ValueError(f"q.shape={q.shape}: must be [B, N, H]")
    batch, heads, _ = q.shape
    whose, head_dim = ("cache's", layer.k.shape[-1]) if head_dim is None else ("keys'", head_dim)
    if selection.granularity != granularity:
        raise ValueError(f"granularity={selection.granularity!r}: {op} takes {granularity!r}")
    if layer.lengths.shape[0] != batch or heads % layer.lengths.shape[1]:
        raise ValueError(
            f"q.shape={q.shape}: must be [B, N, H], N a multiple of K, where [B, K] is "
            f"{layer.lengths.shape}"
        )
    if q.shape[-1] != head_dim:
        raise ValueError(
            f"q.shape={q.shape}: the last axis must equal the {whose} head dimension, {head_dim}"
        )
    if selection.ids.shape[:2] != layer.lengths.shape:
        raise ValueError(
            f"selection.ids.shape={selection.ids.shape}: must begin with [B, K] = "
            f"{layer.lengths.shape}"
        )
    for name in ("count", "dense"):
        field = getattr(selection, name)
        if field is not None and field.shape != layer.lengths.shape:
            raise ValueError(
                f"selection.{name}.shape={field.shape}: must be [B, K] = {layer.lengths.shape}"
            )
    if selection.bits is not None and selection.bits.shape != selection.ids.shape:
        raise ValueError(
            f"selection.bits.shape={selection.bits.shape}: must be that of ids, "
            f"{selection.ids.shape}"
        )
    known = (*layer.lengths.shape, heads // layer.lengths.shape[1], selection.ids.shape[2])
    if selection.logits is not None and selection.logits.shape != known:
        raise ValueError(
            f"selection.logits.shape={selection.logits.shape}: must be [B, K, G, C] = {known}"
        )
    if selection.bits is not None and layer.page_size > MAX_BITS_PAGE:
        raise ValueError(
            f"page_size={layer.page_size}: must be at most {MAX_BITS_PAGE} where pages carry token "
            "bits"
        )


def check_stats(stats: str | None) -> None:
    """Raises ValueError for a report that no backend makes."""
    kinds = get_args(StatsKind)
    if stats is not None and stats not in kinds:
        raise ValueError(f"stats={stats!r}: must be None or one of {list(kinds)}")


def no_rows(q: Float[Array, "B N H"], layer: LayerCache, *, max_group: int) -> str | None:
    """Returns why the Triton kernel of attention to rows of K and V cannot run here, or None."""
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
