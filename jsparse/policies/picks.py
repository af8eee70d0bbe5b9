"""Picks tokens by weight for later layers, with sinks and recent text among them.

The weight of sinks and recent text in the layer that picks says little about the needs of later
layers, so they are picked regardless of it.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.pallas_kernels.threshold_select.api import Rule, WeightKind
from jsparse.selection import Granularity, Selection, union, window
from jsparse.shapes import Lengths


def pick(
    scores: Float32[Array, "B K units"],
    rule: Rule,
    lengths: Lengths,
    *,
    sink: int,
    recent: int,
    capacity: int,
    granularity: Granularity,
    unit: int,
    weights: WeightKind = "softmax",
) -> Selection:
    """Picks units by a rule, those of the first `sink` and last `recent` slots among them.

    TopK counts them: they are lifted above all others, so that they are its first picks, and where
    k is less than their number it takes the best of them. The other rules pick as ever, and the
    units are added. With sink=0 and recent=0 the rule alone decides.

    Args:
        scores: the scores of pages or tokens for `threshold_select`; -inf past a head's tokens.
        rule: TopK, TopP or Threshold.
        lengths: the number of slots that each head holds.
        sink: the number of first slots that are always picked; of pages, all that hold one.
        recent: the same of the last slots.
        capacity: C; under other rules than TopK the number of units.
        granularity: the unit of scores and ids.
        unit: the number of slots of a unit.
        weights: the kind of the scores.
    """
    if isinstance(rule, TopK) and sink + recent:
        scores = _lifted(scores, _always(lengths, sink, recent, scores.shape[-1], unit))
    picked = threshold_select(
        scores[:, :, None],
        rule,
        capacity=capacity,
        granularity=granularity,
        weights=weights,
    )
    if isinstance(rule, TopK) or not sink + recent:
        return picked
    always = window(
        lengths,
        sink=sink,
        recent=recent,
        num_pages=scores.shape[-1],
        page_size=unit,
        granularity=granularity,
    )
    return union(picked, replace(always, bits=None), scores.shape[-1])


def _always(
    lengths: Lengths, sink: int, recent: int, units: int, unit: int
) -> Bool[Array, "B K units"]:
    """Marks the units that hold one of the first `sink` or last `recent` slots of a head."""
    first, held = jnp.arange(units) * unit, lengths[..., None]
    newest = jnp.minimum(first + unit, held) > held - recent
    return (first < held) & ((first < sink) | newest)


def _lifted(
    scores: Float32[Array, "B K units"], marked: Bool[Array, "B K units"]
) -> Float32[Array, "B K units"]:
    """Raises the marked scores above all others and keeps the order among them."""
    best = scores.max(-1, keepdims=True)
    lowest = jnp.where(marked, scores, jnp.inf).min(-1, keepdims=True)
    return jnp.where(marked, scores + (best - lowest + 1), scores)
