"""The settings in which eviction methods differ, and their common state."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Float32, UInt8

from jsparse.cache import LayerCache
from jsparse.hooks import MaxLengthFn
from jsparse.policies.eviction.budgets import MAX_SLOTS, CountFn
from jsparse.policy import Reread
from jsparse.shapes import Lengths, Rows


class EvictionState(NamedTuple):
    """One layer's state; rows own all of it.

    Attributes:
        ring: the newest W queries; that of position p is at index p % W. Without a window, one
            unused query.
        tracked: a number per slot that the method updates; None if it has none.
        temperatures: those of the budget rule `calibrated`; 0: none found yet.
        missed: the number of consecutive compressions that left out each waiting slot; None without
            patience.
    """

    ring: Float[Array, "B W N H"]
    tracked: Float32[Array, "B K S"] | None = None
    temperatures: Float32[Array, "B K"] | None = None
    missed: UInt8[Array, "B K S"] | None = None


class LayerView(NamedTuple):
    """The inputs from which a method scores the slots of a layer.

    Attributes:
        kv: the layer's cache.
        competing: the slots to score.
        ring, tracked: those of the state.
        positions: the number of tokens so far of each row.
        constants: the model's constants that the policy needs.
    """

    kv: LayerCache
    competing: Bool[Array, "B K S"]
    ring: Float[Array, "B W N H"]
    positions: Rows
    tracked: Float32[Array, "B K S"] | None
    constants: Mapping[str, Array] | None = None


class ScoreFn(Protocol):
    """Returns a score for every slot; scores of slots that do not compete are ignored."""

    def __call__(self, view: LayerView, /) -> Float32[Array, "B K S"]: ...


class TrackFn(Protocol):
    """Returns the tracked numbers after a step.

    `shares` are those of the attention of the group's mean query, 0 for empty slots; `positions`
    are those of the newest tokens.
    """

    def __call__(
        self,
        tracked: Float32[Array, "B K S"],
        shares: Float32[Array, "B K S"],
        lengths: Lengths,
        positions: Rows,
        /,
    ) -> Float32[Array, "B K S"]: ...


class Tracking(NamedTuple):
    """The tracked numbers: their values at the prompt's end, and their update per step."""

    begin: ScoreFn
    step: TrackFn


class Settings(NamedTuple):
    """The settings in which the methods differ.

    Attributes:
        score: scores slots.
        rule: returns the number of competing slots that each head keeps.
        max_length: the maximum slots of a head, as in Policy.
        window: W, the number of newest queries that are stored for `score`.
        kept: the maximum that `rule` returns.
        sink: the number of protected slots at the front, without the merged one.
        recent: the number of protected newest slots; None: W.
        period: the new tokens of a row between compressions; 0: compresses only after the prompt.
        merge: whether dropped slots are merged into one after the sinks.
        patience: the number of compressions for which the `period` best dropped slots of a head
            wait: they are not read, but can be chosen again.
        tracking: the update of per-slot numbers; None if there are none.
        calibrates: whether `rule` has temperatures.
        needs: the model's constants that `score` reads.
        reread: fills the tracked numbers by a second pass over the prompt; None: there is none.
    """

    score: ScoreFn
    rule: CountFn
    max_length: MaxLengthFn
    window: int
    kept: int = MAX_SLOTS
    sink: int = 0
    recent: int | None = None
    period: int = 0
    merge: bool = False
    patience: int = 0
    tracking: Tracking | None = None
    calibrates: bool = False
    needs: tuple[str, ...] = ()
    reread: Reread | None = None

    @property
    def tracks(self) -> bool:
        """Whether the method has a number per slot."""
        return self.tracking is not None or self.reread is not None

    @property
    def first(self) -> int:
        """The number of protected slots at the front."""
        return self.sink + self.merge

    @property
    def newest(self) -> int:
        """The number of protected newest slots."""
        return self.window if self.recent is None else self.recent
