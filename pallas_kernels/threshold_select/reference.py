"""Implements `api.threshold_select` in plain jnp: the CPU path and the kernel's oracle."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.pallas_kernels.threshold_select.rules import (
    Always,
    Budget,
    Rule,
    Threshold,
    TopK,
    TopP,
)
from jsparse.selection import Selection, from_page_mask, from_token_mask
from jsparse.selection.partials import softmax_partial
from jsparse.selection.threshold import budget_mask, ordered, top_k_ids, top_k_mask, top_p_mask
from jsparse.shapes import Lengths

REACH = 2.0**-1  # of scores above the largest, so that none becomes infinite
TINY = 2.0**-100  # a number slightly above it is still normal
HIGHEST = 2.0**126
MIN_WEIGHT = 2.0**-125  # float32 is not precise below this fraction of the row's largest weight


def threshold_select(
    scores: Float[Array, "B K G n"],
    rule: Rule,
    *,
    capacity: int,
    granularity: str,
    page_size: int,
    weights: str,
    group: str,
    lengths: Lengths | None,
    names: Int32[Array, "B K m"] | None,
    always: Always | None,
) -> Selection:
    """Implements `api.threshold_select` in plain jnp."""
    rows = scores.astype(jnp.float32)
    if lengths is not None:
        rows = jnp.where(jnp.arange(rows.shape[-1]) < lengths[..., None, None], rows, -jnp.inf)
    rows = jnp.where(jnp.isnan(rows), -jnp.inf, rows)
    softmax = weights == "softmax"
    if granularity == "page_mass":
        rows = page_mass(rows, page_size, softmax)
    normalised = group == "max" and rows.shape[2] > 1
    if normalised:
        rows = pooled(rows, softmax)[:, :, None]
    if always is not None:
        rows = raised(rows, come_first(always, rows.shape[-1])[:, :, None])
    if granularity == "token" and isinstance(rule, TopK) and rows.shape[2] == 1:
        listed = heaviest(rows[:, :, 0], rule, capacity)
        return listed if names is None else named(listed, names, rows.shape[-1] // names.shape[-1])
    kept = chosen(rows, rule, softmax, normalised).any(2)
    if capacity < kept.shape[-1]:
        kept &= top_k_mask(jnp.where(kept, pooled(rows, softmax), -jnp.inf), capacity)
    if granularity == "token":
        listed = from_token_mask(kept, capacity, page_size=1)
    else:
        listed = from_page_mask(kept, capacity)
    return listed if names is None else named(listed, names, kept.shape[-1] // names.shape[-1])


def heaviest(rows: Float32[Array, "B K n"], rule: TopK, capacity: int) -> Selection:
    """Lists the k tokens with the highest scores of one row per head, excluding -inf.

    Marks of all rows would give the same result, but take three times as long on a CPU.
    """
    keys = jnp.where(jnp.isneginf(rows), 0, ordered(rows))
    k = jnp.broadcast_to(jnp.clip(jnp.asarray(rule[0]), 1, capacity), rows.shape[:-1])
    return Selection(*top_k_ids(keys, k, capacity), granularity="token")


def come_first(always: Always, units: int) -> Bool[Array, "B K n"]:
    """Marks the units that precede all others."""
    first, held = jnp.arange(units) * always.unit, always.lengths[..., None]
    newest = jnp.minimum(first + always.unit, held) > held - always.recent
    return (first < held) & ((first < always.sink) | newest)


def raised(
    rows: Float32[Array, "B K 1 n"], marked: Bool[Array, "B K 1 n"]
) -> Float32[Array, "B K 1 n"]:
    """Raises the marked scores above all others, preserving their order.

    Scores beyond HIGHEST count as HIGHEST, so that larger numbers exist.
    """
    known, rows = rows > -jnp.inf, jnp.minimum(rows, HIGHEST)
    top = rows.max(-1, keepdims=True)
    low = jnp.where(known, rows, jnp.inf).min(-1, keepdims=True)
    floor = jnp.where(jnp.abs(top) < TINY, TINY, jnp.nextafter(top, jnp.inf))
    return jnp.where(marked & known, floor + (rows * REACH - low * REACH), rows)


def named(listed: Selection, names: Int32[Array, "B K m"], span: int) -> Selection:
    """Lists units by their names; `span` adjacent units share a name."""
    ids = jnp.take_along_axis(names, listed.ids // span, -1) * span + listed.ids % span
    valid = jnp.arange(ids.shape[-1]) < listed.count[..., None]
    return replace(listed, ids=jnp.where(valid, ids, 0))


def page_mass(
    rows: Float32[Array, "B K G n"], page_size: int, softmax: bool
) -> Float32[Array, "B K G M"]:
    """Sums each page's weights, as a logarithm if rows are logits.

    A page without selectable tokens gets -inf.
    """
    pages = rows.reshape(*rows.shape[:-1], -1, page_size)
    if softmax:
        return softmax_partial(pages)[2]
    sums = jnp.where(jnp.isneginf(pages), 0.0, pages).sum(-1)
    return jnp.where(jnp.isneginf(pages).all(-1), -jnp.inf, sums)


def pooled(rows: Float32[Array, "B K G n"], softmax: bool) -> Float32[Array, "B K n"]:
    """Returns each unit's best score in any row of a group.

    Logits of several rows are first converted to logarithms of their normalised weights.
    """
    if softmax and rows.shape[2] > 1:
        lse = softmax_partial(rows)[2]
        rows = rows - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]
    return rows.max(2)


def chosen(
    rows: Float32[Array, "B K G n"], rule: Rule, softmax: bool, normalised: bool
) -> Bool[Array, "B K G n"]:
    """Marks the units that each row selects; `normalised`: exp(rows) are the weights."""
    setting = jnp.asarray(rule[0])[..., None] if jnp.ndim(rule[0]) else rule[0]
    if isinstance(rule, TopK):
        return top_k_mask(rows, jnp.maximum(setting, 1))
    if isinstance(rule, Budget):
        return budget_mask(rows, rule.sizes[:, :, None], jnp.asarray(setting))
    if isinstance(rule, TopP):
        weights = softmax_partial(rows)[0] if softmax else jnp.maximum(rows, 0.0)
        return top_p_mask(
            jnp.where(weights < MIN_WEIGHT, 0.0, weights) if softmax else weights, setting
        )
    assert isinstance(rule, Threshold)
    bound = jnp.asarray(setting, jnp.float32)[..., None]
    if softmax:
        bound = jnp.log(jnp.maximum(bound, 0.0)) + (
            0.0 if normalised else softmax_partial(rows)[2][..., None]
        )
    above = rows > bound
    return jnp.where(above.any(-1, keepdims=True), above, top_k_mask(rows, 1))
