"""Attends to selected slots in plain jnp, for the references of sparse decode kernels."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import (
    Int8Pages,
    LayerCache,
    PagePool,
    read_heads,
    read_pages,
    read_slots,
    rounded_to,
)
from jsparse.selection import Selection, unpack_bits
from jsparse.selection.attended import token_mask
from jsparse.selection.partials import AttentionOut, MeanStatsKind, Stats, softmax_partial


def masked(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    sm_scale: float,
    stats: MeanStatsKind | None,
) -> AttentionOut:
    """Reads every slot and masks those not selected, at any granularity."""
    mask = token_mask(
        selection, layer.lengths, num_pages=layer.num_pages, page_size=layer.page_size
    )
    bias = None if layer.bias is None else read_heads(layer.bias, layer)
    o, lse, mean_logits = attend(
        q, read_heads(layer.k, layer), read_heads(layer.v, layer), mask, bias, sm_scale
    )
    return AttentionOut(o, lse, _report(mean_logits, layer, stats))


def gathered(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    sm_scale: float,
    stats: MeanStatsKind | None,
) -> AttentionOut:
    """Reads only the listed slots, plus the newest token if a list lacks it."""
    lengths = layer.lengths[..., None]
    slots, listed = _listed_slots(layer, selection)
    newest = lengths - 1
    missing = (selection.count > 0) & ~jnp.any(listed & (slots == newest), -1)
    slots = jnp.concatenate([slots, jnp.maximum(newest, 0)], axis=-1)
    mask = jnp.concatenate(
        [listed & (slots[..., :-1] < lengths), missing[..., None] & (newest >= 0)], axis=-1
    )

    def rows(pool: Array | PagePool) -> Array:
        return _read(pool, layer, selection, slots)

    bias = None if layer.bias is None else rows(layer.bias)
    o, lse, mean_logits = attend(q, rows(layer.k), rows(layer.v), mask, bias, sm_scale)
    if stats is None:
        return AttentionOut(o, lse)
    row, head = (i[..., None] for i in jnp.indices(layer.lengths.shape))
    everywhere = jnp.full((*mask.shape[:2], layer.capacity), -jnp.inf)
    everywhere = everywhere.at[row, head, jnp.where(mask, slots, layer.capacity)].set(
        mean_logits, mode="drop"
    )
    return AttentionOut(o, lse, _report(everywhere, layer, stats))


def exact(layer: LayerCache) -> LayerCache:
    """Returns a layer that reads K and V in 8 bits as float32, without a rounding."""
    if isinstance(layer.k, Int8Pages) and isinstance(layer.v, Int8Pages):
        k, v = (replace(pool, of_type=jnp.dtype(jnp.float32)) for pool in (layer.k, layer.v))
        return layer._replace(k=k, v=v)
    return layer


def _listed_slots(
    layer: LayerCache, selection: Selection
) -> tuple[Int32[Array, "B K n"], Bool[Array, "B K n"]]:
    """Returns every slot that the list names, and a mask of the attended ones."""
    valid = jnp.arange(selection.ids.shape[-1], dtype=jnp.int32) < selection.count[..., None]
    if selection.granularity == "token":
        return selection.ids, valid
    size = layer.page_size
    slots = selection.ids[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    marks = jnp.broadcast_to(valid[..., None], slots.shape)
    if selection.bits is not None:
        marks &= unpack_bits(selection.bits, size)
    return slots.reshape(*valid.shape[:2], -1), marks.reshape(*valid.shape[:2], -1)


def _read(
    pool: Array | PagePool,
    layer: LayerCache,
    selection: Selection,
    slots: Int32[Array, "B K n"],
) -> Array:
    """Gathers the listed rows, in whole pages for a list of pages, then the newest token's."""
    if selection.granularity == "token":
        return read_slots(pool, layer, slots)
    pages = read_pages(pool, layer, selection.ids)
    pages = pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])
    return jnp.concatenate([pages, read_slots(pool, layer, slots[..., -1:])], axis=2)


def attend(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B K S"],
    bias: Float32[Array, "B K S"] | None,
    sm_scale: float,
) -> tuple[Float32[Array, "B N H"], Float32[Array, "B N"], Float32[Array, "B K S"]]:
    """Returns o, lse and the logits of each group's mean query."""
    batch, heads, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, head_dim)
    weights, total, lse = softmax_partial(score(grouped, k, mask, bias, sm_scale))
    o = jnp.einsum(
        "bkgs,bksh->bkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    o = o / jnp.where(total == 0, 1.0, total)[..., None]
    return (
        o.reshape(batch, heads, head_dim),
        lse.reshape(batch, heads),
        score(_mean_query(grouped), k, mask, bias, sm_scale)[:, :, 0],
    )


def score(
    queries: Float[Array, "B K n H"],
    k: Float[Array, "B K S H"],
    mask: Bool[Array, "B K S"],
    bias: Float32[Array, "B K S"] | None,
    sm_scale: float,
) -> Float32[Array, "B K n S"]:
    """Returns the logits, -inf where the mask is not set."""
    logits = sm_scale * jnp.einsum(
        "bknh,bksh->bkns", queries, k, preferred_element_type=jnp.float32
    )
    if bias is not None:
        logits += bias[:, :, None]
    return jnp.where(mask[:, :, None], logits, -jnp.inf)


def _mean_query(grouped: Float[Array, "B K G H"]) -> Float[Array, "B K 1 H"]:
    """Averages the group's queries, rounded to their type."""
    mean = jnp.mean(grouped, axis=2, keepdims=True, dtype=jnp.float32)
    return rounded_to(mean, grouped.dtype)


def _report(
    mean_logits: Float32[Array, "B K S"], layer: LayerCache, stats: MeanStatsKind | None
) -> Stats | None:
    if stats is None:
        return None
    lse = softmax_partial(mean_logits)[2]
    if stats == "token_logits":
        return Stats(mean_logits, lse)
    paged = mean_logits.reshape(*mean_logits.shape[:2], layer.num_pages, layer.page_size)
    return Stats(softmax_partial(paged)[2], lse)
