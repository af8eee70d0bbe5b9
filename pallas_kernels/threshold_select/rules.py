"""Defines the rules by which a row chooses units.

A rule's number is static; an array gives every KV head its own.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, Integer

from jsparse.shapes import Lengths


class TopK(NamedTuple):
    """Chooses the k best; a k below 1 counts as 1."""

    k: int | Int[Array, "B K"]


class TopP(NamedTuple):
    """Chooses the fewest, best first, whose weights are at least the share p of the row's.

    From p = 1 on it chooses all that weigh anything.
    """

    p: float | Float[Array, "B K"]


class Threshold(NamedTuple):
    """Chooses everything that weighs more than theta, or the best one where nothing does."""

    theta: float | Float[Array, "B K"]


class Budget(NamedTuple):
    """Chooses units, best first, until the next one's size exceeds the rest of `tokens`.

    The best is chosen whatever its size; otherwise the sizes of what a row chooses add up to at
    most `tokens`, of which a number below 0 counts as 0. Sizes are at least 0, one per scored unit;
    heads may share theirs.
    """

    tokens: int | Int[Array, "B K"]
    sizes: Integer[Array, "B #K n"]


Rule = TopK | TopP | Threshold | Budget


class Always(NamedTuple):
    """Names the units that TopK chooses before all others.

    They hold one of the first `sink` or last `recent` slots of a head. What has no score is not
    chosen even so. Where there are more of them than k, the best are chosen, as far as two steps of
    float32 at the largest score of the row tell them apart.

    Attributes:
        lengths: the number of slots that each head holds.
        sink: a number of slots.
        recent: a number of slots.
        unit: the number of slots of a unit.
    """

    lengths: Lengths
    sink: int
    recent: int
    unit: int
