"""Implements `api.block_sparse_decode` in plain jnp: the CPU path and the kernel's oracle."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.selected_attention import exact, gathered, masked
from jsparse.selection import Selection
from jsparse.selection.partials import AttentionOut, MeanStatsKind


def block_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float,
    stats: MeanStatsKind | None,
    dtype: DTypeLike,
) -> AttentionOut:
    """Implements `api.block_sparse_decode` in plain jnp.

    With dense heads it reads and masks every slot; without, it gathers only the listed pages.
    """
    run = gathered if selection.dense is None else masked
    out = run(q, exact(layer), selection, sm_scale, stats)
    return out._replace(o=out.o.astype(dtype))
