"""Rules by which a row selects units.

A rule's number is static; an array gives every KV head its own.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, Integer

from jsparse.shapes import Lengths


class TopK(NamedTuple):
    """The k best units; a k below 1 counts as 1."""

    k: int | Int[Array, "B K"]


class TopP(NamedTuple):
    """The fewest units, best first, with at least the share p of the row's weight.

    From p = 1 on, these are all units with any weight.
    """

    p: float | Float[Array, "B K"]


class Threshold(NamedTuple):
    """All units that weigh more than theta, or the best one if none does."""

    theta: float | Float[Array, "B K"]


class Budget(NamedTuple):
    """The best units, until the next one's size exceeds the rest of `tokens`.

    The best unit is selected whatever its size; otherwise the selected sizes add up to at most
    `tokens`. Negative `tokens` count as 0. Sizes are at least 0, one per scored unit; heads may
    share them.
    """

    tokens: int | Int[Array, "B K"]
    sizes: Integer[Array, "B #K n"]


Rule = TopK | TopP | Threshold | Budget


class Always(NamedTuple):
    """The units that TopK selects before all others.

    They contain one of the first `sink` or last `recent` slots of a head. A unit without a score is
    not selected even so. If there are more than k of them, the best are selected, provided their
    scores differ by at least two float32 steps at the row's largest score.

    Attributes:
        lengths: the number of tokens of each head.
        sink: a number of slots.
        recent: a number of slots.
        unit: the number of slots per unit.
    """

    lengths: Lengths
    sink: int
    recent: int
    unit: int
