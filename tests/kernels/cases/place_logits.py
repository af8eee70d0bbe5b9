"""Cases of `place_logits`. Values that the op must not read are NaN."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jsparse.selection import Selection
from tests.kernels.cases.named import Named, put, ragged

Inputs = namedtuple("Inputs", "logits selection lengths")


@dataclass(frozen=True)
class Case(Named):
    """A call of `place_logits`.

    Attributes:
        lengths: tokens per head: "full", all M·P; "ragged", any number, including a full head, an
            empty one and one of a single token.
        listed: pages per head: "any" of all M, also past its length; "held", some of those it
            holds; "first" and "newest", only that one; "all" M; "none".
        capacity: C; None: M.
        dense: heads that read everything they hold.
        spare: pages of room in the logits beyond the most that a head reads.
        by_slot: whether logits are in slot order.
    """

    batch: int = 2
    kv_heads: int = 4
    page_size: int = 16
    num_pages: int = 9
    lengths: Literal["full", "ragged"] = "ragged"
    listed: Literal["any", "held", "first", "newest", "all", "none"] = "any"
    capacity: int | None = None
    dense: Literal["none", "mixed", "all"] = "none"
    spare: int = 2
    by_slot: bool = False

    @property
    def options(self) -> dict[str, int | bool]:
        """The arguments of the op that are not arrays, except `stats`."""
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "by_slot": self.by_slot,
        }

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads, size = (self.batch, self.kv_heads), self.page_size
        lengths = np.full(heads, self.num_pages * size, np.int32)
        if self.lengths == "ragged":
            lengths = ragged(rng, heads, self.num_pages * size, least=0).astype(np.int32)
        capacity = self.num_pages if self.capacity is None else self.capacity
        ids, count = np.zeros((*heads, capacity), np.int32), np.zeros(heads, np.int32)
        dense = {"none": None, "all": np.ones(heads, bool), "mixed": rng.random(heads) < 0.5}[
            self.dense
        ]
        maximum = max(capacity + 1 if capacity else 0, 0 if dense is None else self.num_pages)
        maximum = self.num_pages - self.spare if self.by_slot else maximum
        logits = np.full((*heads, maximum + self.spare, size), np.nan, np.float32)
        for head in np.ndindex(*heads):
            used = -(-int(lengths[head]) // size)
            chosen = self._pages(rng, used, capacity)
            count[head] = chosen.size
            ids[head][: chosen.size] = chosen
            missing = chosen.size > 0 and used - 1 not in chosen
            if dense is not None and dense[head]:
                chosen, missing = np.arange(used), False
            slots = np.append(chosen, used - 1)[: chosen.size + missing, None] * size + np.arange(
                size
            )
            attended = (slots < lengths[head]) & (rng.random(slots.shape) < 0.8)
            if missing:
                attended[-1] = slots[-1] == lengths[head] - 1
            if not used:
                continue
            own = np.where(attended, rng.normal(scale=5, size=slots.shape), -np.inf)
            if self.by_slot:
                ignored = slots >= lengths[head]
                ignored[-1:] |= missing & ~attended[-1:]
                held = slots[:, 0] // size
                there = held < self.num_pages
                logits[head][held[there]] = np.where(ignored, np.nan, own)[there]
            else:
                logits[head][: len(slots)] = own
        selection = Selection(put(ids), put(count), dense=put(dense))
        return Inputs(put(logits.reshape(lengths.size, -1)), selection, put(lengths))

    def _pages(self, rng: np.random.Generator, used: int, capacity: int) -> np.ndarray:
        """Draws the list of a head that holds tokens in its first `used` pages."""
        if self.listed in ("any", "held"):
            among = self.num_pages if self.listed == "any" else used
            size = int(rng.integers(0, min(among, capacity) + 1))
            return np.sort(rng.choice(among, size, replace=False)) if size else np.arange(0)
        alone = {
            "first": np.arange(min(used, 1)),
            "newest": np.arange(used)[-1:],
            "none": np.arange(0),
        }
        return alone.get(self.listed, np.arange(self.num_pages))


CASES = (
    Case("any"),
    Case("held", listed="held"),
    Case("all", listed="all"),
    Case("none", listed="none"),
    Case("first", listed="first", capacity=3),
    Case("newest", listed="newest", lengths="full"),
    Case("no_list", listed="none", capacity=0),
    Case("dense_and_listed", dense="mixed"),
    Case("dense_and_short_lists", dense="mixed", listed="held", capacity=2),
    Case("dense_and_no_list", dense="mixed", listed="none", capacity=0),
    Case("all_dense", dense="all", listed="none", capacity=0, spare=0),
    Case("pages_of_64", page_size=64, num_pages=5, dense="mixed"),
    Case("pages_of_24", page_size=24),
    Case("many_pages", num_pages=700, capacity=300, lengths="full"),
    Case("many_pages_dense", num_pages=515, capacity=31, dense="mixed"),
    Case("by_slot", by_slot=True),
    Case("by_slot_dense", dense="mixed", listed="held", capacity=2, by_slot=True),
    Case("by_slot_24", page_size=24, num_pages=300, dense="mixed", by_slot=True),
)
