"""One new query a head against the pages that a Selection names."""

from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_decode import reference
from jsparse.pallas_kernels.dispatch import Backend, check_shapes, check_stats, choose
from jsparse.partials import AttentionOut, StatsKind
from jsparse.selection import Selection

BACKENDS = (Backend("reference", lambda: reference.block_sparse_decode),)


def block_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float | None = None,
    stats: StatsKind | None = None,
    implementation: str | None = None,
) -> AttentionOut:
    """Attention of one query a head over the selected pages of its KV head.

    Args:
        q: the queries, after RoPE.
        layer: the K and V pages, lengths, block table and bias.
        selection: granularity "page"; what its fields mean is said there.
        sm_scale: multiplies q·k; None is 1/√H.
        stats: what to report of the mean query of each group, or None.
        implementation: "reference", or None to pick.

    Returns:
        float32 o and lse, and stats if asked for.

    Raises:
        ValueError: shapes, granularity or page size do not fit together.
    """
    check_shapes("block_sparse_decode", "page", q, layer, selection)
    check_stats(stats)
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    return choose(
        "block_sparse_decode", implementation, BACKENDS, q, layer, selection, sm_scale=sm_scale, stats=stats
    )
