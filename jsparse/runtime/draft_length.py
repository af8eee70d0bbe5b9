"""Chooses how many tokens a policy drafts, from the acceptance rate and the time of rounds.

A round of d drafts takes about `base` + d x `each`, and gives 1 + p + … + p^d tokens to a row if a
draft after accepted ones is accepted with probability p (Leviathan et al., arXiv:2211.17192, eq.
1). With the chosen number, rows take the least time to their ends, above all the slowest: a batch
ends with its last row. This module uses neither jax nor a clock.
"""

import copy
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np

# The time of a number of drafts is the median of its newest NEWEST rounds, known from ENOUGH rounds
# on: the first round may take much longer.
NEWEST, ENOUGH = 5, 3
# The weight of a round decays by this factor with each later one: about the last twenty rounds
# determine the estimate.
FADING = 0.95
# Prior: this number of drafts verified, and this share of them accepted; a row's is that of all.
PRIOR_DRAFTS, PRIOR_SHARE = 8.0, 0.8
# The exponent of the mean over rows of the time that they still take: 1 would be the mean, and a
# large one the maximum, which a single row's unlucky rounds would decide.
POWER = 4
# The number of rounds between trials of another number, which keep the estimates current.
TRY_EVERY = 32
# If drafting gains less than this factor, the trial is a round without drafts.
DOUBTFUL = 1.2
# If nothing is drafted, a draft is tried less often: it costs more than it reveals.
TRY_ONE_EVERY = 128
# The number of rounds without drafts after which a program for such rounds is worth compiling, and
# the most rounds that it runs: more would delay the next draft.
OFTEN, MOST_STEPS = 16, 8
# The number of tokens that matrix products process in the time of one, since they are bound by
# reading the weights. More are bound by arithmetic; on a CPU any number is.
VERIFIED_GPU = 256
# With the token before them and a report on all, MOST_GPU drafts of 8 query heads per KV head fit
# in one call of the decode kernel, which takes 64 queries of a KV head.
LEAST_GPU, MOST_GPU, MOST_CPU = 4, 6, 2
# the number of keys whose newest estimates are kept
KEPT = 64
# the newest estimates by key, and the lock of all estimates
_newest: "dict[Hashable, DraftLength]" = {}
_sharing = Lock()


def most_drafts(rows: int, *, on_gpu: bool) -> int:
    """Returns the largest number of drafts worth verifying at once, in a program of `rows` rows."""
    return min(max(VERIFIED_GPU // rows - 1, LEAST_GPU), MOST_GPU) if on_gpu else MOST_CPU


class Acceptance:
    """The share of a row's drafts that are accepted; recent rounds count most.

    Attributes:
        reached, kept: the drafts whose predecessors were all accepted, and the accepted ones.
    """

    def __init__(self, reached: float = 0.0, kept: float = 0.0) -> None:
        """Begins with these numbers of drafts."""
        self.reached, self.kept = reached, kept

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Records the drafted and the accepted tokens of a round, per row."""
        reached = [min(kept + 1, number) for number, kept in zip(drafted, accepted, strict=True)]
        if any(reached):  # otherwise the round has no information
            self.reached = FADING * self.reached + sum(reached)
            self.kept = FADING * self.kept + sum(accepted)


class Remaining(NamedTuple):
    """The tokens that a row still wants, and the acceptance of its drafts."""

    tokens: int
    acceptance: Acceptance


class DraftLength:
    """The choice of how many tokens the rows of a round draft."""

    def __init__(self, *, adapts: bool) -> None:
        """Sets up the estimates; without `adapts`, `choose` always returns the maximum."""
        self._adapts = adapts
        self._all = Acceptance(PRIOR_DRAFTS, PRIOR_DRAFTS * PRIOR_SHARE)
        newest = partial(deque[float], maxlen=NEWEST)
        self._times: dict[int, dict[int, deque[float]]] = defaultdict(lambda: defaultdict(newest))
        self._of_steps: dict[int, deque[float]] = defaultdict(newest)
        self._rounds = self._without = self._untried = 0

    @classmethod
    def continuing(cls, key: Hashable, *, adapts: bool) -> "DraftLength":
        """Returns estimates that begin as the newest ones with this key, of an equal program.

        Numbers need not be tried again for each text.
        """
        key = key, adapts
        with _sharing:
            before = _newest.pop(key, None)
            estimates = copy.deepcopy(before) if before else cls(adapts=adapts)
            _newest[key] = estimates
            if len(_newest) > KEPT:
                _newest.pop(next(iter(_newest)))
        return estimates

    @property
    def idles(self) -> bool:
        """Whether most recent rounds drafted nothing."""
        return self._without >= OFTEN

    @property
    def agreement(self) -> float:
        """The probability that a draft is accepted, given that all drafts before it are."""
        return self._all.kept / self._all.reached

    def choose(
        self,
        most: int,
        rows: int = 1,
        remaining: Sequence[Remaining] = (),
        *,
        steps: bool = False,
    ) -> int:
        """Returns the number of drafts of the next round, in a program of `rows` rows.

        Args:
            most: the largest number.
            rows: the rows of the program, whose times are kept apart.
            remaining: what each row still wants; (): rows that end are replaced, and the most
                tokens per second count.
            steps: whether rounds without drafts have a program of their own.

        Returns:
            The number, 0 if drafting does not pay.
        """
        if not self._adapts:
            return most
        with _sharing:
            chosen = self._chosen(most, rows, remaining, steps=steps)
        self._without = max(0, self._without + (1 if chosen == 0 else -1))
        return chosen

    def _chosen(self, most: int, rows: int, remaining: Sequence[Remaining], *, steps: bool) -> int:
        self._rounds += 1
        # two numbers determine the time of a draft; small ones waste little if none is accepted
        several, times = (most + 1) // 2, self._times[rows]
        first = {several, several // 2}
        if steps and 0 in first:  # which would run in another program
            first = {most, 1}
        if sum(len(each) >= ENOUGH for each in times.values()) < len(first):
            return min(sorted(first, reverse=True), key=lambda number: len(times[number]))
        if steps and len(self._of_steps[rows]) < ENOUGH:
            return 0
        speeds = self._speeds(most, rows, remaining, steps=steps)
        best = max(range(most + 1), key=speeds.__getitem__)
        if best == 0:
            if self._untried < TRY_ONE_EVERY:
                return 0
            self._untried = 0
            return 1
        if self._rounds % TRY_EVERY == 0:
            if speeds[best] < DOUBTFUL * speeds[0]:
                return 0
            step = 1 if self._rounds // TRY_EVERY % 2 else -1
            return best + step if 0 <= best + step <= most else best - step
        return best

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Records the drafted and the accepted tokens of a round, per row."""
        self._all.observe(drafted, accepted)

    def took(self, rows: int, drafts: int, seconds: float, *, steps: int = 0) -> None:
        """Records the time of a round in which rows drafted at most `drafts` tokens each.

        `steps`: the number of rounds without drafts, if their own program ran them in this time.
        """
        with _sharing:
            self._untried += steps if steps else int(drafts == 0)
            if steps:
                self._of_steps[rows].append(seconds / steps)
            else:
                self._times[rows][drafts].append(seconds)

    def _speeds(
        self, most: int, rows: int, remaining: Sequence[Remaining], *, steps: bool
    ) -> list[float]:
        """Returns how fast rows near their ends, for each number of drafts up to `most`."""
        # of each row; a row without drafts has the acceptance of all
        prior = PRIOR_DRAFTS * self.agreement
        wanted = np.array([row.tokens for row in remaining] or [1.0])
        shares = np.array(
            [
                (row.acceptance.kept + prior) / (row.acceptance.reached + PRIOR_DRAFTS)
                for row in remaining
            ]
            or [self.agreement]
        )
        tokens = np.cumsum(shares ** np.arange(most + 1)[:, None], axis=0)
        rounds = np.mean((wanted / tokens) ** POWER, axis=1) ** (1 / POWER)
        seconds = [self._seconds(rows, drafts, steps=steps) for drafts in range(most + 1)]
        return (1 / (np.array(seconds) * rounds)).tolist()

    def _seconds(self, rows: int, drafts: int, *, steps: bool) -> float:
        """Returns the time of a round, by least squares; measured if it has its own program."""
        if drafts == 0 and steps:
            return max(statistics.median(self._of_steps[rows]), 1e-9)
        known = {number: each for number, each in self._times[rows].items() if len(each) >= ENOUGH}
        times = {number: statistics.median(each) for number, each in known.items()}
        each = 0.0
        if len(times) > 1:
            each = max(statistics.linear_regression([*times], [*times.values()]).slope, 0.0)
        base = statistics.mean(time - each * number for number, time in times.items())
        # a round takes some time, even if the fit gives less
        return max(base + drafts * each, 1e-3 * max(times.values()), 1e-9)
