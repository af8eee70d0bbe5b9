"""One new query a head against the single tokens that a Selection lists."""

from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.dispatch import Backend, check_shapes, check_stats, choose
from jsparse.pallas_kernels.token_sparse_decode import reference
from jsparse.partials import AttentionOut, StatsKind
from jsparse.selection import Selection

BACKENDS = (Backend("reference", lambda: reference.token_sparse_decode),)


def token_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float | None = None,
    stats: StatsKind | None = None,
    implementation: str | None = None,
) -> AttentionOut:
    """Attention of one query a head over the listed slots of its KV head; rows are gathered one by one.

    Arguments, results and errors are those of `block_sparse_decode`, but that `selection` lists tokens.
    """
    check_shapes("token_sparse_decode", "token", q, layer, selection)
    check_stats(stats)
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    return choose(
        "token_sparse_decode", implementation, BACKENDS, q, layer, selection, sm_scale=sm_scale, stats=stats
    )
