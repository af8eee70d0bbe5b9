"""Defines RequestOutput, the answers to one prompt, and when things happened to its request."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jsparse.runtime.collecting import CompletionOutput


@dataclass
class RequestMetrics:
    """Holds when things happened to a request, in seconds of the engine's clock.

    Attributes:
        arrived: when it was added.
        scheduled: when its first chunk was dispatched; None before.
        token_times: when the host knew each token, of all answers.
    """

    arrived: float
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def time_to_first_token(self) -> float | None:
        """Returns the seconds from the request to its first token, if there is one."""
        return self.token_times[0] - self.arrived if self.token_times else None


@dataclass
class RequestOutput:
    """Holds the answers to one prompt.

    Attributes:
        request_id: the request's name.
        prompt: the prompt as it was given, if it was text.
        prompt_ids: the prompt's ids, int32 [T].
        outputs: the `n` answers.
        num_cached_tokens: the prompt tokens that were not computed, since another request, or
            another of these answers, had read them; the most of any answer.
        metrics: when things happened.
        finished: whether all answers are complete.
        policy: the policy that decoded them, with the hyper-parameters that this request set.
    """

    request_id: str
    prompt: str | None
    prompt_ids: np.ndarray
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool
    policy: str

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's ids, as in vLLM. The list is made when it is first read."""
        return self.prompt_ids.tolist()
