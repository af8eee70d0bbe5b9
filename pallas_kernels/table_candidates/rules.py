"""Rules by which tables choose candidates. Their numbers include sinks and the newest token."""

from typing import NamedTuple

from jsparse.shapes import Lengths


class Best(NamedTuple):
    """The slots with the highest scores, `number` per head."""

    number: Lengths


class Kurtosis(NamedTuple):
    """The peaks of either table and their neighbours, as in the LFPS paper.

    With x a table's entries for the n ranked slots of a head, x̄ their mean and κ(x) = Σ(x - x̄)⁴ /
    (Σ(x - x̄)²)², a slot is a peak if x > τ(x) = a·x̄ / κ(x) in either table. If all entries of a
    table are equal, τ is +inf. The slots at offsets -1, 0, 1 and 2 from the peaks are marked if
    they exceed the mean of either table.

    Marked slots rank above all others. A head lists the marked slots and those always listed, but
    at least `min_count` and at most `max_count` slots.

    Attributes:
        a: the factor of the threshold; static.
        min_count, max_count: the bounds on the number of listed slots; if they cross, the smaller
            one is the upper bound.
    """

    a: float
    min_count: Lengths
    max_count: Lengths


CandidateRule = Best | Kurtosis
