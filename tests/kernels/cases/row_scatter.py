"""Cases of `row_scatter`."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np

from tests.kernels.cases.named import Named, put

Inputs = namedtuple("Inputs", "pool ids rows")


@dataclass(frozen=True)
class Case(Named):
    """A call of `row_scatter`.

    Attributes:
        rows: number of rows of the pool.
        width: shape of a row.
        lists: shape of the ids.
        outside: the share of ids without a row, half of them negative, half too large.
    """

    rows: int = 50
    width: tuple[int, ...] = (64,)
    lists: tuple[int, ...] = (2, 3, 5)
    outside: float = 0.3
    dtype: str = "float32"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        pool = rng.integers(0, 100, (self.rows, *self.width))
        ids = rng.permutation(self.rows)[: int(np.prod(self.lists))].reshape(self.lists)
        outside = rng.random(self.lists) < self.outside
        negative = rng.random(self.lists) < 0.5
        ids = np.where(outside, np.where(negative, -1 - ids, self.rows + 2**30), ids)
        rows = rng.integers(100, 120, (*self.lists, *self.width))
        return Inputs(put(pool, self.dtype), put(ids, np.int32), put(rows, self.dtype))


CASES = (
    Case("rows"),
    Case("one_list", lists=(33,)),
    Case("all_of_them", lists=(50,), outside=0.0),
    Case("nothing_written", outside=1.0),
    Case("no_rows", lists=(0,)),
    Case("pages", width=(16, 64), dtype="bfloat16"),
    Case("odd_width", width=(7,)),
    Case("pages_of_96", width=(8, 96), dtype="float16"),
    Case("int8", width=(3, 32), dtype="int8"),
)
