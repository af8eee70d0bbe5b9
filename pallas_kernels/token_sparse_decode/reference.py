"""Implements `api.token_sparse_decode` in plain jnp, with tokens as pages of one."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_decode.reference import gathered, masked
from jsparse.partials import AttentionOut, StatsKind
from jsparse.selection import Selection


def token_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float,
    stats: StatsKind | None,
    dtype: DTypeLike,
) -> AttentionOut:
    """Implement `api.token_sparse_decode` in plain jnp.

    With dense heads every slot is read and masked; without, only the listed slots are gathered.
    """
    run = gathered if selection.dense is None else masked
    out = run(q, layer, selection, sm_scale, stats)
    return out._replace(o=out.o.astype(dtype))
