"""Cases of `row_gather`."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.kernels.cases.named import Named, put

Inputs = namedtuple("Inputs", "pool ids count")


@dataclass(frozen=True)
class Case(Named):
    """A call of `row_gather`.

    Attributes:
        rows: number of rows of the pool.
        width: shape of a row.
        lists: shape of the lists; each has `capacity` rows, some of them twice.
        count: rows to gather per list: "all" passes no count; "some", any number, including 0 and
            C; "zero".
        far: whether ids past the count are far out of range.
    """

    rows: int = 50
    width: tuple[int, ...] = (64,)
    lists: tuple[int, ...] = (2, 3)
    capacity: int = 20
    count: Literal["all", "some", "zero"] = "some"
    far: bool = False
    dtype: str = "float32"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        pool = rng.integers(0, 100, (self.rows, *self.width))
        ids = rng.integers(0, max(self.rows, 1), (*self.lists, self.capacity))
        count = (
            rng.integers(0, self.capacity + 1, self.lists)
            if self.count == "some"
            else np.zeros(self.lists, int)
        )
        if self.count == "some" and count.size > 1:
            count.flat[:2] = 0, self.capacity
        if self.far:
            ids[np.arange(self.capacity) >= count[..., None]] = 2**31 - 1
        count = None if self.count == "all" else count
        return Inputs(put(pool, self.dtype), put(ids, np.int32), put(count, np.int32))


CASES = (
    Case("rows"),
    Case("all_of_them", count="all"),
    Case("one_list", lists=(), capacity=33),
    Case("nothing_wanted", count="zero"),
    Case("far_ids", far=True),
    Case("empty_lists", capacity=0),
    Case("empty_pool", rows=0, capacity=0, count="all"),
    Case("pages", width=(16, 64), dtype="bfloat16"),
    Case("large_pages", width=(32, 128), lists=(3,), dtype="bfloat16"),
    Case("pages_of_96", width=(8, 96), dtype="bfloat16"),
    Case("odd_width", width=(7,)),
    Case("uint32", width=(4,), dtype="uint32"),
)
