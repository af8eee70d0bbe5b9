"""Estimates the times of programs from earlier measurements."""

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

from jsparse.engine.sizes import EngineSizes
from jsparse.engine.step_plan import DecodePlan, PrefillPlan
from jsparse.models.config import ModelConfig
from jsparse.runtime.draft_length import DraftLength, Remaining

# an estimate is the median of this number of programs of a size: the first may take much longer
NEWEST = 5


class LatencyModel:
    """Estimates of program times, and the choice of draft lengths that follows from them.

    The work of a chunk is its number of tokens, weighted by position: attention adds to the
    arithmetic of the model's matrices.
    """

    def __init__(self, config: ModelConfig, sizes: EngineSizes) -> None:
        """Creates a model without measurements, for a model and an engine's sizes."""
        self._sizes, self._length = sizes, DraftLength(adapts=sizes.adapts)
        # the position where attention to earlier tokens costs the same arithmetic as the matrices
        self._even = config.layer_weights / (2 * config.num_heads * config.head_dim)
        newest = partial(deque[float], maxlen=NEWEST)
        self._per_work: dict[tuple[int, int], deque[float]] = defaultdict(newest)
        self._per_step: dict[int, deque[float]] = defaultdict(newest)

    def observe(self, work: PrefillPlan | DecodePlan, milliseconds: float) -> None:
        """Records the time of a program."""
        if isinstance(work, DecodePlan):
            self._per_step[work.num_rows].append(milliseconds / work.steps)
        elif not work.replay:
            per_work = milliseconds / self._work(*_shape(work))
            self._per_work[work.num_rows, work.size].append(per_work)

    def observe_round(
        self,
        work: DecodePlan,
        drafted: Sequence[int],
        accepted: Sequence[int],
        milliseconds: float | None,
    ) -> None:
        """Records the drafts of a verification round, and its time if it was measured."""
        self._length.observe(drafted, accepted)
        if milliseconds is not None:
            steps = work.steps if work.drafts == 0 else 0
            number = max(drafted, default=0)
            self._length.took(work.num_rows, number, milliseconds / 1e3, steps=steps)

    def drafts(self, rows: int, remaining: Sequence[Remaining] = (), *, steps: bool = False) -> int:
        """Returns how many tokens each row drafts next, in a program of `rows` rows.

        `remaining`: what each row still wants; (): rows that end are replaced. `steps`: whether
        rounds without drafts have a program of their own.
        """
        most = self._sizes.drafts_for(rows) or 0
        return self._length.choose(most, rows, remaining, steps=steps)

    @property
    def idles(self) -> bool:
        """Whether the chosen number of drafts has often been 0."""
        return self._length.idles

    def expected(self, work: PrefillPlan | DecodePlan) -> float:
        """Returns the milliseconds that a program will take; 0 without measurements."""
        if isinstance(work, DecodePlan):
            return work.steps * (self.step(work.num_rows) or 0)
        return self.prefill(*_shape(work)) or 0

    def prefill(self, rows: int, size: int, start: int) -> float | None:
        """Returns the milliseconds of a prefill program; None without measurements.

        A program is assumed to be at least as fast per token as smaller ones, so that a size that
        was slow once is retried. If no smaller one was measured, the slowest measurement counts.
        """
        known = {shape: statistics.median(each) for shape, each in self._per_work.items()}
        smaller = [each for (n, tokens), each in known.items() if n * tokens <= rows * size]
        per_work = min(smaller) if smaller else max(known.values(), default=None)
        return None if per_work is None else per_work * self._work(rows, size, start)

    def step(self, rows: int) -> float | None:
        """Returns the milliseconds of a decode step or verification round of `rows` rows.

        If that number of rows was not measured, the slowest measurement counts; None without
        measurements.
        """
        known = [self._per_step[rows]] if rows in self._per_step else self._per_step.values()
        return max(map(statistics.median, known), default=None)

    def _work(self, rows: int, size: int, start: int) -> float:
        return rows * size * (1 + (start + size / 2) / self._even)


def _shape(work: PrefillPlan) -> tuple[int, int, int]:
    """Returns the number and the size of chunks, and the last of their start positions."""
    return work.num_rows, work.size, max(chunk.start for chunk in work.chunks)
