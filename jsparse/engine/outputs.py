"""Collects the tokens of requests as they arrive, and decodes their text on demand."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jsparse.engine.packing import NewTokens
from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.host_reader import text_stream
from jsparse.runtime.request import Request


@dataclass(frozen=True)
class Logprob:
    """Holds the log-probability of a token at its place.

    Attributes:
        logprob: its natural log-probability under the model's own softmax, before any options.
        rank: 1 for the likeliest token, 2 for the next; None where it is not known, as for a
            generated token that is not among the likeliest 20, or where logprobs=0.
        decoded_token: its text; None if the model has no tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """Holds one answer to a prompt.

    Attributes:
        index: the number of the answer among the request's answers.
        text: the text, without special tokens and, unless the request keeps it, the stop string.
        token_ids: the ids, including the end token if one came.
        cumulative_logprob: the sum of the log-probabilities of all tokens so far; None unless
            log-probabilities were requested.
        token_logprobs: the ids' natural log-probabilities under the model's own softmax; None
            unless requested.
        top_logprobs: per token, the likeliest tokens and their log-probabilities; None unless
            requested.
        finish_reason: "stop" (end token or stop string), "length", "abort", "error" (the model's
            logits were NaN), or None while it grows.
        attended_fraction: tokens attended over positions so far, averaged over decode steps, layers
            and KV heads; None before the first decode step.
        read_fraction: the same for tokens whose K and V were read.
        layer_stats: the shares attended and read in each layer of each decode step, [steps, 2, L];
            None unless the engine keeps them.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    attended_fraction: float | None = None
    read_fraction: float | None = None
    layer_stats: np.ndarray | None = None
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Per token, as in vLLM: {token id: Logprob} of the likeliest tokens and of this one.

        None unless requested. It is made when it is first read.
        """
        if self.token_logprobs is None:
            return None
        tops = self.top_logprobs or [{} for _ in self.token_ids]
        return [
            self._named(top, token, logprob)
            for token, logprob, top in zip(self.token_ids, self.token_logprobs, tops, strict=True)
        ]

    def _named(self, top: dict[int, float], token: int, logprob: float) -> dict[int, Logprob]:
        ranks = {other: rank for rank, other in enumerate(top, 1)}
        return {
            other: Logprob(value, ranks.get(other), self._text(other))
            for other, value in ({token: logprob} | top).items()
        }

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.token_text(token)


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


class AnswerBuilder:
    """Collects one answer, which ends at end tokens, stop strings and its number of tokens.

    Text is made when it is needed: for an output, and for stop strings after every token. One
    thread may `take` while another calls `output`.

    Attributes:
        request, index: the request, and the number of the answer among its answers.
        finish: why the answer has ended, or None.
        token_ids, logprobs: its tokens and their log-probabilities.
        layers: the newest decode step's shares attended and read in each layer, if known.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        *,
        keep_layers: bool = True,
    ) -> None:
        """Begins an answer without tokens, which keeps each layer's shares of all steps or not."""
        self.request, self.index = request, index
        self.finish: str | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._top: list[dict[int, float]] = []
        self._shares = np.zeros(2)  # summed
        self.layers: np.ndarray | None = None
        self._layers: list[np.ndarray] = []
        self._keep_layers = keep_layers
        self._logprob = 0.0
        self._tokenizer, self._stream = tokenizer, text_stream(tokenizer, request)
        self._unread: list[int] = []
        self._emitted = 0, 0  # tokens and characters that outputs have had
        self._lock = threading.Lock()

    def take(self, new: NewTokens) -> int:
        """Adds the next tokens, up to the answer's end or NaN logits; returns their number."""
        numbers = next((nth for nth, x in enumerate(new.logprobs) if math.isnan(x)), len(new.ids))
        with self._lock:
            count = 0 if self.finish else self._end_within(new.ids[:numbers])
            if count:
                self._keep(new, count)
            if numbers < len(new.ids):
                self.finish = self.finish or "error"
        return count

    def _end_within(self, ids: Sequence[int]) -> int:
        """Returns how many of these ids belong to the answer, and ends it if they end it."""
        sampling, ends = self.request.sampling, self.request.ends
        left = sampling.max_tokens - len(self.token_ids)
        ids = ids[:left]
        end = next((nth for nth, token in enumerate(ids) if token in ends), None)
        text = ids[:end]
        if not sampling.stop:
            self._unread += text
        for count, token in enumerate(text if sampling.stop else (), 1):
            self._unread.append(token)
            self._advance()
            if self._stream.stopped:
                self.finish = "stop"
                return count
        if end is not None:
            self.finish = "stop"
            return end + 1
        if len(ids) == left:
            self.finish = "length"
        return len(ids)

    def _keep(self, new: NewTokens, count: int) -> None:
        """Keeps the first `count` tokens and their numbers."""
        # the first of all comes from the prompt, not from a decode step
        decoded = slice(0 if self.token_ids else 1, count)
        self.token_ids += new.ids[:count]
        self.logprobs += new.logprobs[:count]
        self._logprob += sum(new.logprobs[:count])
        self._shares += new.shares[decoded].sum(0, np.float64)
        if new.layers is not None and len(new.layers[decoded]):
            self.layers = new.layers[count - 1]
            if self._keep_layers:
                self._layers += [*new.layers[decoded]]
        asked = self.request.sampling.logprobs
        if asked:
            assert new.top is not None
            ids, logprobs = (each[:count, :asked].tolist() for each in new.top)
            self._top += [dict(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]

    def end(self, reason: str) -> None:
        """Ends the answer, unless it has ended."""
        with self._lock:
            self.finish = self.finish or reason

    @property
    def shares(self) -> tuple[float | None, float | None]:
        """Returns the means of the shares attended and read; None before the first decode step."""
        steps = len(self.token_ids) - 1
        attended, read = (self._shares / max(steps, 1)).tolist()
        return (attended, read) if steps > 0 else (None, None)

    def output(self, *, new: bool = False) -> CompletionOutput:
        """Returns the answer as it is now; while it grows, the text that is certain.

        With `new`, its tokens and text are the part since the last output.
        """
        with self._lock:
            self._advance()
            asked, (token, char) = self.request.sampling.logprobs, self._emitted if new else (0, 0)
            text, (attended, read) = self._stream.shown(char), self.shares
            self._emitted = len(self.token_ids), char + len(text)
            layers = self._layers[max(0, token - 1) :]
            return CompletionOutput(
                index=self.index,
                text=text,
                token_ids=self.token_ids[token:],
                cumulative_logprob=None if asked is None else self._logprob,
                token_logprobs=None if asked is None else self.logprobs[token:],
                top_logprobs=self._top[token:] if asked else None,
                finish_reason=self.finish,
                attended_fraction=attended,
                read_fraction=read,
                layer_stats=np.stack(layers) if layers else None,
                tokenizer=self._tokenizer,
            )

    def _advance(self) -> None:
        unread, self._unread = self._unread, []
        if unread:
            self._stream.push(*unread)
        if self.finish:
            self._stream.finish()
