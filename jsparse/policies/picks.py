"""Picks pages by score, and tokens by weight for later layers.

The weights of sinks and recent tokens in the picking layer are poor predictors for later layers, so
these tokens are picked regardless of them.
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
    """Lists the budget // P pages with the highest scores, at least one, including the newest."""
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
    """Picks units by a rule, including those of the first `sink` and last `recent` slots.

    With TopK they count towards k as its first picks; if k is less than their number, TopK picks
    the best of them. The other rules pick as usual, and these units are added. With sink=0 and
    recent=0 only the rule decides.

    Args:
        scores: the scores of pages or tokens for `threshold_select`; -inf past a head's tokens.
        rule: TopK, TopP or Threshold.
        lengths: the number of slots that each head holds.
        sink: the number of first slots that are always picked; with pages, all pages that contain
            one.
        recent: the same for the last slots.
        capacity: C; for rules other than TopK the number of units.
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
