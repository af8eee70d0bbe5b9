"""Limits how long prefill may stall decoding, as `max_stall_ms` allows."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from jsparse.engine.sizes import EngineSizes
from jsparse.engine.step_plan import SequenceState
from jsparse.runtime.draft_length import Remaining

# The most milliseconds of a program of several steps if the stall is unlimited: the next program is
# dispatched before its results arrive.
PROGRAM_MS = 100
# The share of the budget that prefill may use: a program may take longer than estimated, and the
# host receives results with some delay.
MARGIN = 0.85


class Estimates(Protocol):
    """Estimates of program times, in milliseconds; None: unknown."""

    def prefill(self, rows: int, size: int, start: int) -> float | None:
        """Returns the time to prefill `rows` chunks of `size` tokens from position `start` on."""

    def step(self, rows: int) -> float | None:
        """Returns the time of a decode step or verification round in a program of `rows` rows."""

    @property
    def idles(self) -> bool:
        """Whether rows often draft nothing."""
        ...

    def drafts(self, rows: int, remaining: Sequence[Remaining], *, steps: bool) -> int:
        """Returns how many tokens each row drafts next, in a program of `rows` rows.

        `steps`: whether rounds without drafts have a program of their own.
        """
        ...


class StallBudget:
    """A limit on the milliseconds for which prefill stalls decoding."""

    def __init__(
        self,
        sizes: EngineSizes,
        latency: Estimates,
        rows_for: Callable[..., int],
        decoding: Sequence[SequenceState],
    ) -> None:
        """Creates an unused budget; the sequences in `decoding` run in programs of `rows_for`."""
        self._maximum, self._latency = sizes.max_stall_ms, latency
        self._rows_for, self._decoding = rows_for, decoding
        # milliseconds of prefill since the last decode program
        self._stalled: float = 0

    def add_prefill(self, rows: int, size: int, start: int) -> None:
        """Adds the time of a planned prefill program to the stall."""
        self._stalled += self._milliseconds(rows, size, start)

    def reset(self) -> None:
        """Resets the stall: a decode program was planned."""
        self._stalled = 0

    def allows(self, rows: int, size: int, start: int) -> bool:
        """Returns whether the budget allows one prefill program of these chunks."""
        return self._milliseconds(rows, size, start) <= self._left

    def allows_more(self, size: int, start: int) -> bool:
        """Returns whether the budget allows a further chunk before rows decode."""
        return self._stalled + self._milliseconds(1, size, start) <= self._left

    def most_steps(self, steps: int) -> int:
        """Returns the most decode steps of a program, up to `steps`, that fit the budget."""
        of_one = self._of_a_step()
        maximum = PROGRAM_MS if self._maximum is None else self._maximum / 2
        return max(1, int(maximum / of_one)) if steps * of_one > maximum else steps

    @property
    def _left(self) -> float:
        """The milliseconds left for prefill before the next decode program."""
        if self._maximum is None:
            return math.inf
        return MARGIN * self._maximum - self._of_a_step()

    def _milliseconds(self, rows: int, size: int, start: int) -> float:
        """Returns the time of a prefill program; infinity if unknown."""
        took = self._latency.prefill(rows, size, start)
        return math.inf if took is None else took

    def _of_a_step(self) -> float:
        """Returns the time of a decode step or round; 0 if no row decodes, infinity if unknown."""
        if not self._decoding:
            return 0
        took = self._latency.step(self._rows_for(len(self._decoding)))
        return math.inf if took is None else took
