"""Defines RequestOutput, the completions of a prompt, and RequestMetrics, its times."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jsparse.runtime.collecting import CompletionOutput, Logprob, PromptScores, named_logprobs


@dataclass
class RequestMetrics:
    """The times of a request, in seconds of the engine's clock.

    Attributes:
        arrived: when it was added.
        scheduled: when its first chunk was dispatched; None before.
        token_times: when the host received each token, of all completions.
    """

    arrived: float
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def time_to_first_token(self) -> float | None:
        """The seconds from arrival to the first token; None before that."""
        return self.token_times[0] - self.arrived if self.token_times else None


@dataclass
class RequestOutput:
    """The completions of one prompt.

    Attributes:
        request_id: the request's name.
        prompt: the prompt, if it was given as text.
        prompt_ids: the prompt's ids, int32 [T].
        outputs: the `n` completions.
        num_cached_tokens: the prompt tokens that were not computed, since another request, or
            another of these completions, had computed them; the maximum over the completions.
        metrics: the times of the request.
        finished: whether all completions are finished.
        policy: the policy that decoded them, with the hyper-parameters that this request set.
        prompt_scores: the log-probabilities of the prompt's tokens, as arrays; the first token's
            are meaningless. None unless requested.
        num_prompt_logprobs: the number of most likely tokens in `prompt_logprobs`.
    """

    request_id: str
    prompt: str | None
    prompt_ids: np.ndarray
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool
    policy: str
    prompt_scores: PromptScores | None = None
    num_prompt_logprobs: int = 0

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's ids as a list, as in vLLM; created on first use."""
        return self.prompt_ids.tolist()

    @cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Per token of the prompt, as in vLLM: {token id: Logprob}, and None for the first.

        Each has the most likely tokens after those before it, and this one. None unless requested.
        Computed on first access.
        """
        if self.prompt_scores is None:
            return None
        scores, ids = self.prompt_scores, self.prompt_token_ids
        own = scores.logprobs.tolist(), scores.tops(self.num_prompt_logprobs), scores.ranks.tolist()
        # an aborted request may have only the first ones
        rows = zip(ids[: len(own[0])], *own, strict=True)
        named = [named_logprobs(self.outputs[0].tokenizer, *row) for row in rows]
        return [None, *named[1:]]
