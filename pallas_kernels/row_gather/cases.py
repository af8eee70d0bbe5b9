"""Builds the inputs that tests and benchmarks share: named cases, each from a seed."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Inputs(NamedTuple):
    """Holds the op's arguments."""

    pool: jnp.ndarray
    ids: jnp.ndarray
    count: jnp.ndarray | None  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class Case:
    """Describes the shapes and contents of one call.

    Attributes:
        rows: number of rows of the pool.
        width: shape of a row.
        lists: shape of the lists; each names `capacity` rows, some of them twice.
        count: wanted rows per list: "all" passes no count; "some", any number, 0 and C among them;
            "zero".
        far: whether ids past the count are far out of range.
    """

    name: str
    rows: int = 50
    width: tuple[int, ...] = (64,)
    lists: tuple[int, ...] = (2, 3)
    capacity: int = 20
    count: Literal["all", "some", "zero"] = "some"
    far: bool = False
    dtype: str = "float32"

    def build(self, seed: int = 0) -> Inputs:
        """Builds the inputs; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
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
        return Inputs(
            jax.device_put(np.asarray(pool, self.dtype)),
            jax.device_put(np.asarray(ids, np.int32)),
            None if self.count == "all" else jax.device_put(np.asarray(count, np.int32)),
        )


CASES = (
    Case("rows"),
    Case("all_of_them", count="all"),
    Case("one_list", lists=(), capacity=33),
    Case("one_row", rows=1, lists=(), capacity=1, count="all"),
    Case("nothing_wanted", count="zero"),
    Case("far_ids", far=True),
    Case("empty_lists", capacity=0),
    Case("empty_pool", rows=0, capacity=0, count="all"),
    Case("pages", width=(16, 64), dtype="bfloat16"),
    Case("large_pages", width=(32, 128), lists=(3,), dtype="bfloat16"),
    Case("head_dim_96", width=(96,), dtype="float16"),
    Case("pages_of_96", width=(8, 96), dtype="bfloat16"),
    Case("odd_width", width=(7,)),
    Case("single_numbers", width=(1,), capacity=70),
    Case("int8", width=(3, 32), dtype="int8"),
    Case("uint32", width=(4,), dtype="uint32"),
)
