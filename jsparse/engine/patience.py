"""Says for how long prompts may be read while rows that decode wait, as `max_stall_ms` allows."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from jsparse.engine.sizes import EngineSizes
from jsparse.engine.step_plan import Answer

# The most milliseconds of a program of several steps where rows may wait for any time: the next one
# is dispatched before its results are there.
PROGRAM_MS = 100
# The part of the time for which rows may wait that reading is planned for: programs may take longer
# than most have, and results are read when the host gets to it.
MARGIN = 0.85


class Estimates(Protocol):
    """Estimates how many milliseconds programs take; None where nothing is known."""

    def reading(self, rows: int, size: int, start: int) -> float | None:
        """Returns the time to read `rows` chunks of `size` tokens, from the position `start` on."""

    def step(self, rows: int) -> float | None:
        """Returns the time of a decode step, or a round, in a program of `rows` rows."""

    @property
    def idles(self) -> bool:
        """Whether rows often draft nothing."""
        ...

    def drafts(self, rows: int) -> int:
        """Returns how many tokens the rows of such a program draft next."""
        ...


class Patience:
    """Counts for how long the rows that decode have waited, and says when it is too long."""

    def __init__(
        self,
        sizes: EngineSizes,
        pace: Estimates,
        rows_for: Callable[..., int],
        decoding: Sequence[Answer],
    ) -> None:
        """Prepares for the answers that are `decoding` at any time, in programs of `rows_for`."""
        self._maximum, self._pace = sizes.max_stall_ms, pace
        self._rows_for, self._decoding = rows_for, decoding
        # the milliseconds for which rows have not decoded since prompts were read
        self._stalled: float = 0

    def read(self, rows: int, size: int, start: int) -> None:
        """Takes in that rows wait while chunks of these sizes are read."""
        self._stalled += self._milliseconds(rows, size, start)

    def decoded(self) -> None:
        """Takes in that rows decode."""
        self._stalled = 0

    def allows(self, rows: int, size: int, start: int) -> bool:
        """Returns whether rows can wait until such chunks have been read, if nothing else is."""
        return self._milliseconds(rows, size, start) <= self._left

    def allows_more(self, size: int, start: int) -> bool:
        """Returns whether rows can wait for a further chunk before they decode."""
        return self._stalled + self._milliseconds(1, size, start) <= self._left

    def most_steps(self, steps: int) -> int:
        """Returns the most steps of a program, up to `steps`, whose tokens come soon enough."""
        of_one = self._of_a_step()
        maximum = PROGRAM_MS if self._maximum is None else self._maximum / 2
        return max(1, int(maximum / of_one)) if steps * of_one > maximum else steps

    @property
    def _left(self) -> float:
        """The milliseconds for which reading may go on, if the next program decodes."""
        if self._maximum is None:
            return math.inf
        return MARGIN * self._maximum - self._of_a_step()

    def _milliseconds(self, rows: int, size: int, start: int) -> float:
        """Returns the time that a program takes to read these chunks; infinity if unknown."""
        took = self._pace.reading(rows, size, start)
        return math.inf if took is None else took

    def _of_a_step(self) -> float:
        """Returns the time of a step or round; 0 if no row decodes, infinity if unknown."""
        if not self._decoding:
            return 0
        took = self._pace.step(self._rows_for(len(self._decoding)))
        return math.inf if took is None else took
