"""Chooses how many tokens a policy drafts, by the drafts accepted so far and the time rounds took.

A round of d drafts takes about `base` + d x `each`, and gives 1 + p + … + p^d tokens per row where
a draft that is reached agrees with probability p (Leviathan et al., arXiv:2211.17192, eq. 1). The
number is the one with the most tokens per second. It uses neither jax nor a clock.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

# The rounds of a number of drafts whose median is its time, and how many of them make one: the
# first may take much longer.
NEWEST, ENOUGH = 5, 3
# What a round counts less with each one after it: the last twenty make the estimate.
FADING = 0.95
# Before any draft is checked, so many are taken to have been, and this part to have been accepted.
PRIOR_DRAFTS, PRIOR_SHARE = 8.0, 0.8
# Every so many rounds another number is tried, which keeps estimates true.
TRY_EVERY = 32
# Where drafting gains less than this factor, it is no draft that is tried.
DOUBTFUL = 1.2
# Where nothing is drafted, a draft is tried more seldom: it costs more than it can tell.
TRY_ONE_EVERY = 128
# After so many rounds in which nothing was drafted, a program for such rounds is worth compiling.
OFTEN = 16
# The tokens that products take without getting slower, since they read the weights: more are bound
# by arithmetic, and on a CPU all are.
VERIFIED_GPU = 256
# With the token before them and a report on all, so many drafts of 8 query heads per KV head are
# one call of the decode kernel, which takes 64 queries of a KV head.
LEAST_GPU, MOST_GPU, MOST_CPU = 4, 6, 2


def most_drafts(rows: int, *, on_gpu: bool) -> int:
    """Returns the most drafts that are worth checking at once, in a program of so many rows."""
    return min(max(VERIFIED_GPU // rows - 1, LEAST_GPU), MOST_GPU) if on_gpu else MOST_CPU


class DraftLength:
    """Says how many tokens the rows of a round draft."""

    def __init__(self, *, adapts: bool) -> None:
        """Prepares to choose; one that does not adapt always says the most there may be."""
        self._adapts = adapts
        self._reached, self._kept = PRIOR_DRAFTS, PRIOR_DRAFTS * PRIOR_SHARE
        newest = partial(deque[float], maxlen=NEWEST)
        self._times: dict[int, dict[int, deque[float]]] = defaultdict(lambda: defaultdict(newest))
        self._rounds = self._without = 0

    @property
    def idles(self) -> bool:
        """Whether most rounds lately were such in which nothing is drafted."""
        return self._without >= OFTEN

    @property
    def agreement(self) -> float:
        """The probability that a draft agrees behind drafts that do."""
        return self._kept / self._reached

    def choose(self, most: int, rows: int = 1) -> int:
        """Returns the number of drafts of the next round, in a program of so many rows.

        It is at most `most`, and 0 where drafting does not pay.
        """
        if not self._adapts:
            return most
        chosen = self._chosen(most, rows)
        self._without = max(0, self._without + (1 if chosen == 0 else -1))
        return chosen

    def _chosen(self, most: int, rows: int) -> int:
        self._rounds += 1
        if sum(len(times) >= ENOUGH for times in self._times[rows].values()) < 2:
            # two numbers tell what a draft takes; small ones waste little if none agrees
            several, times = (most + 1) // 2, self._times[rows]
            return min((several, several // 2), key=lambda number: len(times[number]))
        rate = partial(self._tokens_per_second, rows)
        best = max(range(most + 1), key=rate)
        if best == 0:
            return int(self._rounds % TRY_ONE_EVERY == 0)
        if self._rounds % TRY_EVERY == 0:
            if rate(best) < DOUBTFUL * rate(0):
                return 0
            step = 1 if self._rounds // TRY_EVERY % 2 else -1
            return best + step if 0 <= best + step <= most else best - step
        return best

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Takes in how many tokens the rows of a round drafted, and how many were accepted."""
        reached = [min(kept + 1, number) for number, kept in zip(drafted, accepted, strict=True)]
        if any(reached):  # else it tells nothing
            self._reached = FADING * self._reached + sum(reached)
            self._kept = FADING * self._kept + sum(accepted)

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """Takes in how long a round took, whose rows drafted at most `drafts` tokens each."""
        self._times[rows][drafts].append(seconds)

    def _tokens_per_second(self, rows: int, drafts: int) -> float:
        tokens = sum(self.agreement**nth for nth in range(drafts + 1))
        return tokens / self._seconds(rows, drafts)

    def _seconds(self, rows: int, drafts: int) -> float:
        """Returns the time of a round: of one without drafts its own, else by least squares."""
        known = {number: each for number, each in self._times[rows].items() if len(each) >= ENOUGH}
        times = {number: statistics.median(each) for number, each in known.items()}
        if drafts == 0 and 0 in times:
            return max(times[0], 1e-9)
        if len(times) > 2:  # a round without drafts may be a program of its own
            times.pop(0, None)
        each = max(statistics.linear_regression([*times], [*times.values()]).slope, 0.0)
        base = statistics.mean(time - each * number for number, time in times.items())
        # whatever was measured, a round takes some time
        return max(base + drafts * each, 1e-3 * max(times.values()), 1e-9)
