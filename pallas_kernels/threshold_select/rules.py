"""What a row of scores may choose by. A number is static; an array gives every KV head its own."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class TopK(NamedTuple):
    """The k best; a k below 1 counts as 1."""

    k: int | Int[Array, "B K"]


class TopP(NamedTuple):
    """The fewest, best first, whose weights are at least the share p of the row's; from p = 1 on,
    all that weigh.
    """

    p: float | Float[Array, "B K"]


class Threshold(NamedTuple):
    """Everything that weighs more than theta, or the best one where nothing does."""

    theta: float | Float[Array, "B K"]


Rule = TopK | TopP | Threshold
