"""Cases of `runs_to_tokens`. Ids past a head's count are `JUNK`, to detect reads of them."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.kernels.cases.named import Named, put

JUNK = 10**9
Inputs = namedtuple("Inputs", "ids number edges lengths")  # `number` is the argument `count`


@dataclass(frozen=True)
class Case(Named):
    """A call of `runs_to_tokens`.

    Attributes:
        runs: n.
        listed: R.
        count: chosen runs per head: "any" number, including R and 0; "all" R.
        like: lengths of the runs: "short", 8 to 16; "one_long", the same except one of `long`;
            "mixed", from 0 to `long`, half of them 0.
        shared: whether all heads of a row have the same runs.
        outside: whether heads have lengths. The first edge is from 0 to 5, and heads hold up to
            `long` slots past the last edge; the last head holds 2 slots.
        capacity: C; None: the most that any head needs.
    """

    batch: int = 2
    kv_heads: int = 3
    runs: int = 40
    listed: int = 12
    count: Literal["any", "all"] = "any"
    like: Literal["short", "one_long", "mixed"] = "short"
    long: int = 143
    shared: bool = False
    outside: bool = False
    capacity: int | None = None

    def inputs(self, rng: np.random.Generator) -> tuple[Inputs, int]:
        """Draws the arrays and the capacity."""
        heads = (self.batch, self.kv_heads)
        sizes = self._sizes(rng, (self.batch, 1 if self.shared else self.kv_heads, self.runs))
        first = rng.integers(0, 6, (*sizes.shape[:2], 1))
        edges = np.cumsum(np.concatenate([first, sizes], -1), -1)
        lengths = None
        if self.outside:
            lengths = edges[..., -1] + rng.integers(0, self.long + 1, heads)
            lengths.flat[-1] = 2
        count = np.full(heads, self.listed)
        if self.count == "any":
            count = rng.integers(0, self.listed + 1, heads)
            count.flat[:2] = (self.listed, 0)[: count.size]
        ids = np.full((*heads, self.listed), JUNK)
        maximum = 1
        for head in np.ndindex(*heads):
            chosen = np.sort(rng.choice(self.runs, count[head], replace=False))
            ids[head][: chosen.size] = chosen
            number = np.broadcast_to(sizes, (*heads, self.runs))[head][chosen].sum()
            if lengths is not None:
                own = np.broadcast_to(edges, (*heads, self.runs + 1))[head]
                number += own[0] + lengths[head] - own[-1]
            maximum = max(maximum, int(number))
        arrays = Inputs(*(put(x, np.int32) for x in (ids, count, edges, lengths)))
        return arrays, maximum if self.capacity is None else self.capacity

    def _sizes(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if self.like == "mixed":
            return rng.integers(0, self.long + 1, shape) * rng.integers(0, 2, shape)
        sizes = rng.integers(8, 17, shape)
        if self.like == "one_long":
            sizes[..., self.runs // 2] = self.long
        return sizes


CASES = (
    Case("any"),
    Case("shared", shared=True, like="mixed"),
    Case("all", listed=40, like="one_long"),
    Case("cut", listed=30, count="all", capacity=100),
    Case("cut_in_a_long_run", listed=40, count="all", like="one_long", long=5000, capacity=1000),
    Case("room_to_spare", like="mixed", capacity=3000),
    Case("no_slots", like="mixed", long=0),
    Case("one_run", batch=1, kv_heads=1, runs=1, listed=1, count="all"),
    Case("one_slot", capacity=1),
    Case("many_blocks", runs=900, listed=700, like="mixed", long=20, shared=True),
    Case("outside", outside=True, shared=True, like="one_long"),
    Case("outside_cut", outside=True, listed=30, count="all", capacity=200),
    Case("odd", kv_heads=2, runs=333, listed=130, like="one_long", capacity=1023),
)
