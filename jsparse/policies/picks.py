"""Picks pages by score, and tokens by weight for later layers.

The weight of sinks and recent text in the layer that picks says little about the needs of later
layers, so they are picked regardless of it.
"""

from dataclasses import replace

from jaxtyping import Array, Float32

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.threshold_select import Always, TopK, threshold_select
from jsparse.pallas_kernels.threshold_select.api import WeightKind
from jsparse.pallas_kernels.threshold_select.rules import Rule
from jsparse.selection import Granularity, Selection, union, window
from jsparse.shapes import Lengths


def best_pages(scores: Float32[Array, "B K M"], kv: LayerCache, budget: int) -> Selection:
    """Lists the pages of greatest score, budget // P of them but at least one, and the newest."""
    pages = min(max(budget // kv.page_size, 1), kv.num_pages)
    return threshold_select(
        scores[:, :, None],
        TopK(pages),
        capacity=pages,
        granularity="page",
        weights="raw",
        always=Always(kv.lengths, sink=0, recent=1, unit=kv.page_size),
    )


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

    TopK counts them: they are its first picks, and where k is less than their number it takes the
    best of them. The other rules pick as ever, and the units are added. With sink=0 and recent=0
    the rule alone decides.

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
    some, counts_them = sink + recent > 0, isinstance(rule, TopK)
    picked = threshold_select(
        scores[:, :, None],
        rule,
        capacity=capacity,
        granularity=granularity,
        weights=weights,
        always=Always(lengths, sink, recent, unit) if some and counts_them else None,
    )
    if counts_them or not some:
        return picked
    added = window(
        lengths,
        sink=sink,
        recent=recent,
        num_pages=scores.shape[-1],
        page_size=unit,
        granularity=granularity,
    )
    return union(picked, replace(added, bits=None), scores.shape[-1])
