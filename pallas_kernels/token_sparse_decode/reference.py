"""Implements `api.token_sparse_decode` in plain jnp, with tokens as pages of one."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.cache import LayerCache, read_slots
from jsparse.pallas_kernels.selected_attention import exact, gathered, masked
from jsparse.pallas_kernels.token_sparse_decode.listed import listed_tokens
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products, weighted_sum
from jsparse.selection import Selection
from jsparse.selection.partials import AttentionOut, ListedLogits, StatsKind, softmax_partial


def token_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float,
    stats: StatsKind | None,
    dtype: DTypeLike,
) -> AttentionOut:
    """Implements `api.token_sparse_decode` in plain jnp.

    With dense heads it reads and masks every slot; without, it gathers only the listed slots.
    """
    layer = exact(layer)
    if selection.dense is not None:
        kind = None if stats == "listed_logits" else stats
        out = masked(q, layer, selection, sm_scale, kind)
        if stats == "listed_logits":
            out = out._replace(stats=_listed(q, layer, selection, sm_scale).stats)
    elif stats is None or stats == "listed_logits":
        out = _listed(q, layer, selection, sm_scale)
        out = out if stats else out._replace(stats=None)
    else:
        out = gathered(q, layer, selection, sm_scale, stats)
    return out._replace(o=out.o.astype(dtype))


def _listed(
    q: Float[Array, "B N H"], layer: LayerCache, selection: Selection, sm_scale: float
) -> AttentionOut:
    """Attends to the listed tokens, and reports every query head's logit for each."""
    ids, count = listed_tokens(selection, layer.lengths)
    valid = jnp.arange(ids.shape[-1], dtype=jnp.int32) < count[..., None]
    grouped = q.reshape(*count.shape, -1, q.shape[-1])
    if selection.logits is None:
        logits = sm_scale * products(grouped, layer.k, layer, ids)
    else:  # the newest token, which lists may lack, is last
        last = count[..., None] - 1
        newest = jnp.clip(layer.lengths[..., None] - 1, 0)
        of_newest = sm_scale * products(grouped, layer.k, layer, newest)
        known = jnp.pad(selection.logits, ((0, 0), (0, 0), (0, 0), (0, 1)))
        is_newest = jnp.arange(ids.shape[-1], dtype=jnp.int32) == last
        logits = jnp.where(is_newest[:, :, None], of_newest, known)
    if layer.bias is not None:
        logits += read_slots(layer.bias, layer, ids)[:, :, None]
    logits = jnp.where(valid[:, :, None], logits, -jnp.inf)
    weights, total, lse = softmax_partial(logits)
    o = weighted_sum(weights.astype(layer.v.dtype), layer.v, layer, ids)
    o = o / jnp.where(total == 0, 1.0, total)[..., None]
    report = ListedLogits(ids, count, logits, lse)
    return AttentionOut(o.reshape(q.shape), lse.reshape(q.shape[:2]), report)
