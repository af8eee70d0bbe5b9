"""Builds the inputs that tests and benchmarks share: named cases, each from a seed.

Logits of sinks are large, so that a kernel that counts them shows.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.partials import ListedLogits

_SINK_LOGIT = 60.0


class Inputs(NamedTuple):
    """Holds the op's arguments."""

    vertical: jnp.ndarray
    distance: jnp.ndarray
    listed: ListedLogits
    lengths: jnp.ndarray
    scale: jnp.ndarray
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Describes the shapes and contents of one call, with the letters of jsparse.shapes.

    Attributes:
        group: G.
        slots: S.
        entries: entries per head, the newest token's among them.
        listed: tokens of each head: "any", some of what it holds, the newest among them; "none",
            none in every second head; "sinks", sinks and the newest; "all" that it holds.
        spread: standard deviation of the logits.
        scale: the greatest factor of a row; rows have different ones from 1 on.
        penalty, sink: the op's.
    """

    name: str
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

    def build(self, seed: int = 0) -> Inputs:
        """Builds the inputs; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
        heads = self.batch, self.kv_heads
        lengths = rng.integers(1, self.slots + 1, heads)
        edges = [self.slots, 0, 1][: lengths.size - 1]
        lengths.flat[: len(edges)] = edges
        ids, count = np.zeros((*heads, self.entries), np.int32), np.zeros(heads, np.int32)
        for nth, head in enumerate(np.ndindex(*heads)):
            chosen = self._tokens(rng, nth, int(lengths[head]))
            count[head] = chosen.size
            ids[head][: chosen.size] = chosen
        logits = rng.normal(scale=self.spread, size=(*heads, self.group, self.entries))
        logits = np.where(ids[:, :, None] < self.sink, _SINK_LOGIT, logits)
        valid = np.arange(self.entries) < count[..., None]
        logits = np.where(valid[:, :, None], logits, -np.inf)
        vertical, distance = rng.gamma(0.1, size=(2, *heads, self.slots)) * self.scale
        scale = np.linspace(self.scale, 1.0, self.batch)
        return Inputs(
            jax.device_put(np.asarray(vertical, jnp.bfloat16)),
            jax.device_put(np.asarray(distance, jnp.bfloat16)),
            ListedLogits(
                jax.device_put(ids),
                jax.device_put(count),
                jax.device_put(np.asarray(logits, np.float32)),
                jax.device_put(np.asarray(np.logaddexp.reduce(logits, axis=-1), np.float32)),
            ),
            jax.device_put(np.asarray(lengths, np.int32)),
            jax.device_put(np.asarray(scale, np.float32)),
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
    Case("one_head", batch=1, kv_heads=1, group=1),
    Case("group_of_7", group=7, penalty=0.25),
    Case("peaked", spread=40.0),
    Case("flat", spread=1e-3, penalty=0.5),
    Case("no_sink", sink=0),
    Case("one_entry", entries=1),
    Case("one_slot", batch=1, kv_heads=1, slots=1, entries=1, sink=0),
    Case("odd", slots=333, entries=130, penalty=0.5, scale=700.0),
    Case("long", batch=1, kv_heads=2, slots=5000, entries=1201, scale=50.0),
)
