"""One new query a head against the single tokens that a Selection lists."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.dispatch import check_shapes, check_stats, choose
from jsparse.pallas_kernels.token_sparse_decode import reference
from jsparse.partials import AttentionOut, StatsKind
from jsparse.selection import Selection


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
    run = choose("token_sparse_decode", implementation, {"reference": reference.token_sparse_decode})
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return run(q, layer, selection, sm_scale=jnp.float32(scale), stats=stats)
