"""Cases of `shared_counts`."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Array

from tests.kernels.cases.named import Named, put


@dataclass(frozen=True)
class Case(Named):
    """A call of `shared_counts`.

    Attributes:
        kind: scores are "normal", "uniform", "shares" (positive, over many orders of magnitude,
            each list on its own scale), "ties" (few values), "zeros" (mostly 0 and -0) or "equal".
        share: the fraction of all scores that the lists get in total.
        absent: the fraction of scores that are -inf, NaN or +inf, a third each.
        empty: whether the first list of each row has no finite score.
    """

    batch: int = 2
    lists: int = 3
    slots: int = 200
    kind: Literal["normal", "uniform", "shares", "ties", "zeros", "equal"] = "normal"
    min_count: int = 10
    max_count: int = 150
    share: float = 0.5
    absent: float = 0.0
    empty: bool = False
    dtype: str = "float32"

    @property
    def bounds(self) -> dict[str, int]:
        """The floor and the cap as arguments of the op."""
        return {"min_count": self.min_count, "max_count": self.max_count}

    def inputs(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Draws scores and totals. Each row has its own total."""
        shape = (self.batch, self.lists, self.slots)
        x = rng.normal(size=shape)
        scores = {
            "normal": x,
            "uniform": rng.random(shape),
            "shares": np.exp(2.5 * x + 2 * rng.normal(size=(*shape[:2], 1)) - 9),
            "ties": np.round(2 * x),
            "zeros": np.where(rng.random(shape) < 0.7, 0.0 * x, np.exp(x)),  # 0 and -0
            "equal": np.ones(shape),
        }[self.kind]
        odd = rng.choice([-np.inf, np.nan, np.inf], shape)
        scores = np.where(rng.random(shape) < self.absent, odd, scores)
        if self.empty:
            scores[:, 0] = -np.inf
        fair = self.share * self.lists * self.slots
        total = fair * rng.uniform(0.9, 1.1, self.batch)
        return put(scores, self.dtype), put(total, np.int32)


CASES = (
    Case("normal"),
    Case("shares", kind="shares"),
    Case("ties", kind="ties"),
    Case("zeros", kind="zeros"),
    Case("equal", kind="equal"),
    Case("one_list", lists=1, max_count=200),
    Case("one_score_each", slots=1, min_count=0, max_count=1),
    Case("absent", absent=0.6, min_count=90),
    Case("nothing", absent=1.0, empty=True, lists=1),
    Case("an_empty_list", empty=True, kind="shares"),
    Case("floors_are_more_than_all", min_count=120, max_count=130, share=0.3),
    Case("caps_are_less_than_all", max_count=60),
    Case("nothing_wanted", share=0.0, min_count=0),
    Case("bfloat16", dtype="bfloat16", kind="uniform"),
    Case("odd_slots", lists=5, slots=333, kind="shares"),
    Case("low_tail", lists=8, slots=640, max_count=640, min_count=0, share=0.9),
)
# the heads of a layer, as in a compression
LARGE = (
    Case("llama", lists=8, slots=2176, kind="shares", min_count=476, max_count=2012),
    Case(
        "10_lists_of_ties",
        lists=10,
        slots=2000,
        kind="ties",
        min_count=0,
        max_count=2000,
        absent=0.1,
    ),
    Case("one_long_list", lists=1, slots=4096, min_count=0, max_count=4096),
    Case("rows", batch=200, lists=4, slots=700, kind="shares", max_count=650),
)
