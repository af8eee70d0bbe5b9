"""Cases of `table_update`. Logits of sinks are large, so that counting them is detected."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jsparse.selection.partials import ListedLogits
from tests.kernels.cases.named import Named, packed, put, ragged

_SINK_LOGIT = 60.0
Inputs = namedtuple("Inputs", "vertical distance listed lengths scale kwargs")


@dataclass(frozen=True)
class Case(Named):
    """A call of `table_update`.

    Attributes:
        group: G.
        slots: S.
        entries: entries per head, including the newest token's.
        listed: tokens per head: "any", some of those it holds, including the newest; "none", none
            in every second head; "sinks", sinks and the newest; "all" that it holds.
        spread: standard deviation of the logits.
        scale: the largest factor of a row; rows have different ones from 1 on.
        penalty, sink: the op's.
    """

    batch: int = 2
    kv_heads: int = 4
    group: int = 4
    slots: int = 200
    entries: int = 41
    listed: Literal["any", "none", "sinks", "all"] = "any"
    spread: float = 3.0
    scale: float = 1.0
    penalty: float = 0.0
    sink: int = 4

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads = self.batch, self.kv_heads
        lengths = ragged(rng, heads, self.slots)
        lists = (self._tokens(rng, nth, int(held)) for nth, held in enumerate(lengths.flat))
        ids, count = packed(lists, heads, self.entries)
        logits = rng.normal(scale=self.spread, size=(*heads, self.group, self.entries))
        logits = np.where(ids[:, :, None] < self.sink, _SINK_LOGIT, logits)
        valid = np.arange(self.entries) < count[..., None]
        logits = np.where(valid[:, :, None], logits, -np.inf)
        vertical, distance = rng.gamma(0.1, size=(2, *heads, self.slots)) * self.scale
        scale = np.linspace(self.scale, 1.0, self.batch)
        return Inputs(
            put(vertical, jnp.bfloat16),
            put(distance, jnp.bfloat16),
            ListedLogits(
                put(ids),
                put(count),
                put(logits, np.float32),
                put(np.logaddexp.reduce(logits, axis=-1), np.float32),
            ),
            put(lengths, np.int32),
            put(scale, np.float32),
            {"sink": self.sink, "penalty": self.penalty},
        )

    def _tokens(self, rng: np.random.Generator, nth: int, length: int) -> np.ndarray:
        """Draws the list of a head."""
        if length == 0 or (self.listed == "none" and nth % 2):
            return np.arange(0)
        older = min(length, self.entries) - 1
        if self.listed == "sinks":
            chosen = np.arange(min(self.sink, older))
        elif self.listed == "all":
            chosen = np.arange(length - 1 - older, length - 1)
        else:
            chosen = np.sort(rng.choice(length - 1, rng.integers(0, older + 1), replace=False))
        return np.append(chosen, length - 1)


CASES = (
    Case("any"),
    Case("penalty", penalty=0.5),
    Case("large_scale", scale=4096.0),
    Case("none", listed="none"),
    Case("sinks", listed="sinks", penalty=0.5),
    Case("all", listed="all", slots=40),
    Case("group_of_7", group=7, penalty=0.25),
    Case("flat", spread=1e-3, penalty=0.5),
    Case("no_sink", sink=0),
    Case("one_slot", batch=1, kv_heads=1, slots=1, entries=1, sink=0),
    Case("odd", slots=333, entries=130, penalty=0.5, scale=700.0),
    Case("long", batch=1, kv_heads=2, slots=5000, entries=1201, scale=50.0),
)
