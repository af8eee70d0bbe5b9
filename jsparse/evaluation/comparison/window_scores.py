"""Scores policies on windows of a text: each is fed the last tokens through its decode step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jsparse.cache import CacheSpec
from jsparse.evaluation.closeness import closeness
from jsparse.evaluation.statistics import summarize
from jsparse.evaluation.teacher_forcing import force
from jsparse.models.checkpoint import Params
from jsparse.policy import AnyPolicy
from jsparse.runtime.host_reader import OnChunk

METRICS = ("kl", "agreement", "logprob", "attended", "read", "bytes_share")


class WindowScores:
    """The scores of policies, each of which is run once.

    `prompts` and `ends` are the windows' two parts (`closeness.windows`), and `spec` has the sizes
    of the cache: its batch is the number of windows that are run together.
    """

    def __init__(
        self,
        params: Params,
        prompts: Sequence[list[int]],
        ends: Sequence[list[int]],
        spec: CacheSpec,
        report: OnChunk | None = None,
    ) -> None:
        self._params, self._prompts, self._ends = params, prompts, ends
        self._spec, self._report = spec, report
        self._values: dict[AnyPolicy, list[dict[str, float]]] = {}

    def add(self, policies: Sequence[AnyPolicy]) -> None:
        """Runs the policies that were not run before, with one prefill of each window."""
        new = [policy for policy in dict.fromkeys(policies) if policy not in self._values]
        count, batch = len(self._ends), self._spec.batch
        for first in range(0, count if new else 0, batch):
            # the last batch repeats its last window, so that one batch size is compiled
            windows = [min(first + nth, count - 1) for nth in range(batch)]
            forcing = force(
                self._params,
                new,
                [self._prompts[nth] for nth in windows],
                max_new_tokens=len(self._ends[0]) - 1,
                continuation=[self._ends[nth] for nth in windows],
                max_length=self._spec.capacity,
                page_size=self._spec.page_size,
                on_progress=self._report,
            )
            result = closeness(forcing)
            means = {name: np.mean(getattr(result, name), axis=-1) for name in METRICS}
            for policy in new:
                at = result.policies.index(str(policy))
                self._values.setdefault(policy, []).extend(
                    {name: float(mean[at, row]) for name, mean in means.items()}
                    for row in range(min(batch, count - first))
                )

    def mean(self, policy: AnyPolicy, metric: str) -> float:
        """Returns a metric's mean over the windows of a policy that was run."""
        return float(np.mean([values[metric] for values in self._values[policy]]))

    def metrics(self) -> dict[AnyPolicy, dict[str, Any]]:
        """Returns the metrics of all policies as in `statistics.summarize`."""
        cells = summarize(
            {
                "policy": str(policy),
                "task": "",
                "length": self._spec.capacity,
                "index": nth,
                "values": values,
                "meta": {},
            }
            for policy, of_windows in self._values.items()
            for nth, values in enumerate(of_windows)
        )
        return {policy: cell["metrics"] for policy, cell in zip(self._values, cells, strict=True)}
