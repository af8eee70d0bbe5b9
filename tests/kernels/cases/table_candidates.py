"""Cases of `table_candidates`. Entries that the op must not read are NaN."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jsparse.pallas_kernels.table_candidates import Best, Kurtosis
from tests.kernels.cases.named import Named, put, ragged

type Like = Literal[
    "past", "signed", "ties", "constant", "zeros", "large", "striped", "inverted", "flat", "gap"
]
Inputs = namedtuple("Inputs", "vertical distance lengths rule kwargs")


@dataclass(frozen=True)
class Case(Named):
    """A call of `table_candidates`.

    Attributes:
        slots: S.
        number: the number of listed slots of a head, as a share of its length.
        a: the factor of the paper's rule, with bounds `number` (if `floor`, else 0) and 3 · number;
            None: the rule of the best.
        capacity: C; None: the most that the rule can list.
        like: distribution of the entries: "past", most near 0 and few large ones, like attention;
            "signed", normal; "ties", few different numbers; "constant"; "zeros"; "large", up to
            2^12 times as large as "past"; "striped", 0 for 8 slots in turn with "past" for 8, over
            slots only; "inverted", likewise 1 for 8 and 0.5 to 1 for 8, so that a sample may see
            only the largest; "flat", all within a factor of two, like nearly uniform attention;
            "gap", likewise, but nearly C entries are 32 times as high, like tokens that many steps
            list.
        ragged: whether heads hold different numbers of slots, including 0, 1, sink and S.
    """

    batch: int = 2
    kv_heads: int = 4
    slots: int = 200
    number: float = 0.2
    a: float | None = None
    floor: bool = False
    capacity: int | None = None
    sink: int = 4
    like: Like = "past"
    ragged: bool = False

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads = self.batch, self.kv_heads
        lengths = np.full(heads, self.slots)
        if self.ragged:
            lengths = ragged(rng, heads, self.slots, min(self.sink, self.slots))
        newest, at = lengths[..., None] - 1, np.arange(self.slots)
        by_slot = self.like in ("striped", "inverted")
        entries = self._entries(rng), self._entries(rng) * (not by_slot)
        looked_at = (
            (at >= self.sink) & (at < newest),
            (at >= 1) & (at <= newest - self.sink),
        )
        vertical, distance = (
            put(np.where(ok, x, np.nan), jnp.bfloat16)
            for ok, x in zip(looked_at, entries, strict=True)
        )
        wanted = np.ceil(self.number * lengths).astype(np.int32)
        maximum = wanted if self.a is None else 3 * wanted
        capacity = min(max(int(maximum.max()), 1), self.slots)
        if self.a is None:
            rule = Best(put(wanted))
        else:
            rule = Kurtosis(self.a, put(wanted * self.floor), put(maximum))
        kwargs = {"capacity": self.capacity or capacity, "sink": self.sink}
        return Inputs(vertical, distance, put(lengths, np.int32), rule, kwargs)

    def _entries(self, rng: np.random.Generator) -> np.ndarray:
        shape = self.batch, self.kv_heads, self.slots
        past, flat = rng.gamma(0.1, size=shape), rng.uniform(0.7, 1.4, shape)
        stripes = np.arange(self.slots) // 8 % 2
        return {
            "past": past,
            "signed": rng.normal(size=shape),
            "ties": rng.integers(-2, 3, shape).astype(float),
            "constant": np.full(shape, 0.5),
            "zeros": np.where(rng.random(shape) < 0.5, 0.0, -0.0),
            "large": past * 2.0 ** rng.uniform(0, 12, shape),
            "striped": past * stripes,
            "inverted": np.where(stripes, rng.uniform(0.5, 1.0, shape), 1.0),
            "flat": flat,
            "gap": flat * np.where(rng.random(shape) < 0.49 * self.number, 32.0, 1.0),
        }[self.like]


CASES = (
    Case("best"),
    Case("best_ragged", ragged=True),
    Case("best_signed", like="signed", ragged=True),
    Case("best_ties", like="ties", ragged=True),
    Case("best_zeros", like="zeros", ragged=True),
    Case("best_large", like="large", ragged=True),
    Case("best_one", number=0.001, ragged=True),
    Case("best_below_sinks", number=0.015),
    Case("best_all", number=1.0, ragged=True),
    Case("best_capped", number=0.5, capacity=17, ragged=True),
    Case("best_no_sink", sink=0, ragged=True),
    Case("best_one_slot", batch=1, kv_heads=1, slots=1),
    Case("best_odd", slots=333, number=0.3, ragged=True),
    Case("best_long", batch=1, kv_heads=2, slots=5000, number=0.04, ragged=True),
    Case("best_striped", batch=1, kv_heads=1, slots=8000, number=0.04, like="striped"),
    Case("best_inverted", batch=1, kv_heads=1, slots=8000, number=0.7, like="inverted"),
    Case("best_flat", slots=2000, number=0.04, like="flat", ragged=True),
    Case("best_gap", slots=2000, number=0.04, like="gap", ragged=True),
    Case("paper", a=0.05),
    Case("paper_ragged", a=0.05, ragged=True),
    Case("paper_ties", a=0.05, like="ties", ragged=True),
    Case("paper_constant", a=0.05, like="constant"),
    Case("paper_zeros", a=0.05, like="zeros", ragged=True),
    Case("paper_floor", a=1.0, floor=True, ragged=True),
    Case("paper_capped", a=0.01, capacity=13),
    Case("paper_long", a=0.1, batch=1, kv_heads=2, slots=5000, number=0.02, ragged=True),
)
