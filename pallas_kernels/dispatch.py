"""What every decode op does before it runs: check shapes, choose a backend.

A named backend runs or raises; None takes the first that the op lists, and the log says which.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, get_args

from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.partials import StatsKind
from jsparse.selection import MAX_BITS_PAGE, Selection

logger = logging.getLogger("jsparse.kernels")


def choose(op: str, implementation: str | None, backends: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The backend to trace. `backends` maps the names that this op has to functions, best first.

    Raises:
        ValueError: `implementation` names a backend that the op does not have.
    """
    if implementation is None:
        implementation = next(iter(backends))
        logger.debug("%s: %s", op, implementation)
    if implementation not in backends:
        raise ValueError(f"implementation={implementation!r}: {op} has {list(backends)}")
    return backends[implementation]


def check_shapes(op: str, granularity: str, q: Float[Array, "B N H"], layer: LayerCache, selection: Selection) -> None:
    """Raises ValueError where queries, cache and selection do not fit together."""
    if q.ndim != 3:
        raise ValueError(f"q.shape={q.shape}: must be [B, N, H]")
    batch, heads, head_dim = q.shape
    if selection.granularity != granularity:
        raise ValueError(f"granularity={selection.granularity!r}: {op} takes {granularity!r}")
    if layer.lengths.shape[0] != batch or heads % layer.lengths.shape[1]:
        raise ValueError(
            f"q.shape={q.shape}: must be [B, N, H], N a multiple of K, where [B, K] is {layer.lengths.shape}"
        )
    if layer.k.shape[-1] != head_dim:
        raise ValueError(f"q.shape={q.shape}: the last axis must equal the cache's head dimension, {layer.k.shape[-1]}")
    if selection.ids.shape[:2] != layer.lengths.shape:
        raise ValueError(f"selection.ids.shape={selection.ids.shape}: must begin with [B, K] = {layer.lengths.shape}")
    for name in ("count", "dense"):
        field = getattr(selection, name)
        if field is not None and field.shape != layer.lengths.shape:
            raise ValueError(f"selection.{name}.shape={field.shape}: must be [B, K] = {layer.lengths.shape}")
    if selection.bits is not None and selection.bits.shape != selection.ids.shape:
        raise ValueError(f"selection.bits.shape={selection.bits.shape}: must be that of ids, {selection.ids.shape}")
    if selection.bits is not None and layer.page_size > MAX_BITS_PAGE:
        raise ValueError(f"page_size={layer.page_size}: must be at most {MAX_BITS_PAGE} where pages carry token bits")


def check_stats(stats: str | None) -> None:
    """Raises ValueError for a report that no backend makes."""
    kinds = get_args(StatsKind)
    if stats is not None and stats not in kinds:
        raise ValueError(f"stats={stats!r}: must be None or one of {list(kinds)}")
