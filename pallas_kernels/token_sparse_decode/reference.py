"""Implements `api.token_sparse_decode` in plain jnp, with tokens as pages of one."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.cache import LayerCache, read_slots
from jsparse.pallas_kernels.block_sparse_decode.reference import gathered, masked, score
from jsparse.pallas_kernels.token_sparse_decode.listed import listed_tokens
from jsparse.partials import AttentionOut, ListedLogits, StatsKind, softmax_partial
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
    if stats == "listed_logits":
        out = run(q, layer, selection, sm_scale, None)
        out = out._replace(stats=_listed_logits(q, layer, selection, sm_scale))
    else:
        out = run(q, layer, selection, sm_scale, stats)
    return out._replace(o=out.o.astype(dtype))


def _listed_logits(
    q: Float[Array, "B N H"], layer: LayerCache, selection: Selection, sm_scale: float
) -> ListedLogits:
    """Read K of the listed tokens and score it for every query head."""
    ids, count = listed_tokens(selection, layer.lengths)
    valid = jnp.arange(ids.shape[-1], dtype=jnp.int32) < count[..., None]
    grouped = q.reshape(*count.shape, -1, q.shape[-1])
    bias = None if layer.bias is None else read_slots(layer.bias, layer, ids)
    logits = score(grouped, read_slots(layer.k, layer, ids), valid, bias, sm_scale)
    return ListedLogits(ids, count, logits, softmax_partial(logits)[2])
