"""Defines the rules by which tables choose candidates. Numbers count sinks and newest token too."""

from typing import NamedTuple

from jsparse.shapes import Lengths


class Best(NamedTuple):
    """Lists the slots of greatest score, `number` per head."""

    number: Lengths


class Kurtosis(NamedTuple):
    """Lists the peaks of either table, and their neighbours, as the paper of LFPS does.

    With x a table's entries for the n ranked slots of a head, x̄ their mean and
    κ(x) = Σ(x - x̄)⁴ / (Σ(x - x̄)²)², a slot stands out where x > τ(x) = a·x̄ / κ(x) in either table.
    Where all entries of a table are equal, τ is +inf. The slots at offsets -1, 0, 1 and 2 from
    those that stand out are marked if they exceed the mean of either table.

    Marked slots rank above all others. A head lists as many slots as are marked or always listed,
    but at least `min_count` and at most `max_count`.

    Attributes:
        a: the factor of the threshold; static.
        min_count, max_count: the bounds on the number of listed slots; the smaller of them is the
            upper bound if they cross.
    """

    a: float
    min_count: Lengths
    max_count: Lengths


CandidateRule = Best | Kurtosis
