"""Builds the inputs that tests and benchmarks share: named cases, each from a seed.

Ids past a head's count are `JUNK`, so that reading them shows.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

JUNK = 10**9


class Inputs(NamedTuple):
    """Holds the op's arrays; `number` is the argument `count`."""

    ids: jnp.ndarray
    number: jnp.ndarray
    starts: jnp.ndarray
    lengths: jnp.ndarray


@dataclass(frozen=True)
class Case:
    """Describes the shapes and contents of one call, with the letters of jsparse.shapes.

    Attributes:
        runs: n.
        listed: R.
        count: runs that heads choose: "any" number, R and 0 among them; "all" R.
        like: lengths of the runs: "short", 8 to 16; "one_long", the same but for one of `long`;
            "mixed", from 0 to `long`, half of them 0.
        shared: whether all heads of a row have the same runs.
        ends: the op's argument.
        capacity: C; None is the most that any head needs.
    """

    name: str
    batch: int = 2
    kv_heads: int = 3
    runs: int = 40
    listed: int = 12
    count: Literal["any", "all"] = "any"
    like: Literal["short", "one_long", "mixed"] = "short"
    long: int = 143
    shared: bool = False
    ends: bool = False
    capacity: int | None = None

    def build(self, seed: int = 0) -> tuple[Inputs, int]:
        """Build the arrays and the capacity; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
        heads = (self.batch, self.kv_heads)
        lengths = self._lengths(rng, (self.batch, 1 if self.shared else self.kv_heads, self.runs))
        gaps = rng.integers(0, 4, lengths.shape)
        starts = np.cumsum(lengths + gaps, -1) - lengths
        count = np.full(heads, self.listed)
        if self.count == "any":
            count = rng.integers(0, self.listed + 1, heads)
            count.flat[:2] = (self.listed, 0)[: count.size]
        ids = np.full((*heads, self.listed), JUNK)
        most = 1
        for head in np.ndindex(*heads):
            between = self.runs - 2 * self.ends
            chosen = np.sort(rng.choice(between, count[head], replace=False))
            ids[head][: chosen.size] = chosen
            if self.ends:
                chosen = np.array([0, *chosen + 1, self.runs - 1])
            most = max(most, int(np.broadcast_to(lengths, (*heads, self.runs))[head][chosen].sum()))
        arrays = (jnp.asarray(x, jnp.int32) for x in (ids, count, starts, lengths))
        return Inputs(*arrays), most if self.capacity is None else self.capacity

    def _lengths(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if self.like == "mixed":
            return rng.integers(0, self.long + 1, shape) * rng.integers(0, 2, shape)
        lengths = rng.integers(8, 17, shape)
        if self.like == "one_long":
            lengths[..., self.runs // 2] = self.long
        return lengths


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
    Case("ends", ends=True, shared=True, like="one_long"),
    Case("ends_of_all", ends=True, listed=38, count="all", like="mixed"),
    Case("ends_alone", batch=1, kv_heads=2, runs=3, listed=1, ends=True),
    Case("ends_cut", ends=True, listed=30, count="all", capacity=200),
    Case("ends_of_many", ends=True, runs=900, listed=255, count="all", shared=True),
    Case("odd", kv_heads=2, runs=333, listed=130, like="one_long", capacity=1023),
)
