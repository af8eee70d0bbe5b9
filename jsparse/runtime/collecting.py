"""Collects the tokens of an output as they arrive, and decodes their text on demand."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.request import Request
from jsparse.text.stream import TextStream

if TYPE_CHECKING:
    from jsparse.runtime.bad_words import BadWords
    from jsparse.runtime.constraint import Constraint

NAN_LOGITS = "the model's logits are NaN: weights hold NaN, or activations overflow their dtype"


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token in an output.

    Attributes:
        logprob: its natural log-probability under the model's own softmax, before any options.
        rank: 1 for the most likely token, 2 for the next; None if it is unknown: for a generated
            token that is not among the 20 most likely, or with logprobs=0.
        decoded_token: its text; None if the model has no tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def named_logprobs(
    tokenizer: Tokenizer | None,
    token: int,
    logprob: float,
    top: Mapping[int, float],
    rank: int | None = None,
) -> dict[int, Logprob]:
    """Returns a token and the most likely ones, by id; `rank` is the token's if not among them."""
    ranks = {token: rank} | {other: nth for nth, other in enumerate(top, 1)}
    return {
        other: Logprob(value, ranks[other], tokenizer and tokenizer.token_text(other))
        for other, value in ({token: logprob} | {**top}).items()
    }


@dataclass
class CompletionOutput:
    """One generated sequence of a request.

    Attributes:
        index: the index of the sequence among the request's n sequences.
        text: the text, without special tokens and, unless the request keeps it, the stop string.
        token_ids: the ids, including the end token if there is one.
        cumulative_logprob: the sum of the log-probabilities of all tokens so far; None unless
            log-probabilities were requested.
        token_logprobs: the ids' natural log-probabilities under the model's own softmax; None
            unless requested.
        top_logprobs: per token, the most likely tokens and their log-probabilities; None unless
            requested.
        finish_reason: "stop" (end token, stop string, or the end of its grammar), "length",
            "abort", "error" (see `error`), or None while it grows.
        attended_fraction: tokens attended over positions so far, averaged over decode steps, layers
            and KV heads; None before the first decode step.
        read_fraction: the same for tokens whose K and V were read.
        layer_stats: the shares attended and read in each layer of each decode step, [steps, 2, L];
            None unless the engine keeps them.
        error: why it could not be continued: the model's logits were NaN, or its grammar is too
            complex.
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
    error: str = ""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Per token, as in vLLM: {token id: Logprob} of the most likely tokens and of this one.

        None unless requested. Computed on first access.
        """
        if self.token_logprobs is None:
            return None
        tops = self.top_logprobs or [{} for _ in self.token_ids]
        return [
            named_logprobs(self.tokenizer, token, logprob, top)
            for token, logprob, top in zip(self.token_ids, self.token_logprobs, tops, strict=True)
        ]


class NewTokens(NamedTuple):
    """The tokens that a sequence got from one program, and the statistics of their n steps.

    Attributes:
        ids, logprobs: the tokens and their log-probabilities under the model's own softmax.
        shares: the shares of the positions so far that were attended and read, [n, 2].
        layers: these two shares for each layer, [n, 2, L]; None unless the engine keeps them.
        top: the most likely tokens and their log-probabilities, [n, top]; None unless requested.
        drafted: the number of drafted tokens, after a verification round.
    """

    ids: list[int]
    logprobs: list[float]
    shares: np.ndarray
    layers: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    drafted: int = 0


class PromptScores(NamedTuple):
    """The log-probabilities of n consecutive tokens of a prompt, each given those before it.

    Attributes:
        logprobs: each token's under the model's own softmax, float32 [n].
        ranks: 1 for the most likely token, 2 for the next, int32 [n].
        top_ids, top_logprobs: the most likely tokens and their log-probabilities, [n, top].
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def tops(self, count: int) -> list[dict[int, float]]:
        """Returns the `count` most likely tokens instead of each token, by id."""
        ids, logprobs = (each[:, :count].tolist() for each in self[2:])
        return [dict(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]


def text_stream(
    tokenizer: Tokenizer | None, request: Request, turn: Sequence[int] = ()
) -> TextStream:
    """Returns the text stream of a request's output, which follows the prompt and `turn`."""
    own = request.sampling
    return TextStream(
        tokenizer,
        tuple(own.stop or ()),
        include_stop=own.include_stop_str_in_output,
        min_tokens=own.min_tokens,
        skip_special=own.skip_special_tokens,
        before=np.concatenate([request.ids, np.asarray(turn, np.int32)]),
    )


def shares(values: Any) -> np.ndarray:
    """Returns shares of the positions so far, limited to 1."""
    # the device averages over heads and layers in float32, where a mean of ones can be 1.0000001
    return np.minimum(values, 1.0)


class OutputBuilder:
    """Collects one sequence, up to an end token, a stop string or its maximum length.

    Text is decoded on demand: for an output, or for stop strings after every token. One thread may
    `take` while another calls `output`.

    Attributes:
        request, index: the request, and the index of the sequence among its n sequences.
        finish: why the sequence has ended, or None.
        token_ids, logprobs: its tokens and their log-probabilities.
        layers: the newest decode step's shares attended and read in each layer, if known.
        constraint: the state of its grammar, if it has one.
        error: why it ended, if it could not continue.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        *,
        keep_layers: bool = True,
        turn: Sequence[int] = (),
    ) -> None:
        """Starts a sequence without tokens.

        Args:
            request: the request.
            index: the index of the sequence among its n sequences.
            tokenizer: the model's tokenizer, if it has one.
            keep_layers: whether to keep each layer's shares of all steps.
            turn: tokens between the prompt and the output that decode steps process.
        """
        self.request, self.index = request, index
        self._undecoded = 0 if turn else 1  # tokens that come from the prompt, not from a step
        self.finish: str | None = None
        self.constraint = request.constraint and request.constraint.copy()
        self.error = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._top: list[dict[int, float]] = []
        self._shares = np.zeros(2)  # sums
        self.layers: np.ndarray | None = None
        self._layers: list[np.ndarray] = []
        self._keep_layers = keep_layers
        self._of_prompt: list[PromptScores] = []
        self._logprob = 0.0
        self._tokenizer, self._stream = tokenizer, text_stream(tokenizer, request, turn)
        self._unread: list[int] = []
        self._emitted = 0, 0  # tokens and characters already emitted
        self._lock = threading.Lock()

    def take(self, new: NewTokens) -> int:
        """Adds the next tokens, up to the sequence's end or NaN logits; returns their number."""
        numbers = next((nth for nth, x in enumerate(new.logprobs) if math.isnan(x)), len(new.ids))
        with self._lock:
            count = 0 if self.finish else self._end_within(new.ids[:numbers])
            if count and self.constraint is not None:
                self._follow(self.constraint, new.ids[:count])
            if count:
                self._keep(new, count)
            if numbers < len(new.ids) and not self.finish:
                self.finish, self.error = "error", NAN_LOGITS
        return count

    def take_prompt(self, scores: PromptScores) -> None:
        """Adds the log-probabilities of the prompt's next tokens."""
        with self._lock:
            self._of_prompt.append(scores)

    @property
    def of_prompt(self) -> PromptScores | None:
        """The log-probabilities of the prompt's tokens so far; None if there are none."""
        with self._lock:
            if len(self._of_prompt) > 1:
                parts = zip(*self._of_prompt, strict=True)
                self._of_prompt = [PromptScores(*map(np.concatenate, parts))]
            return self._of_prompt[0] if self._of_prompt else None

    @property
    def lacks_scores(self) -> bool:
        """Whether log-probabilities of the prompt are requested, and have not all arrived."""
        if self.request.sampling.prompt_logprobs is None or self.finish == "abort":
            return False
        with self._lock:
            return sum(len(part.ranks) for part in self._of_prompt) < len(self.request.ids)

    def _end_within(self, ids: Sequence[int]) -> int:
        """Returns how many of these ids belong to the sequence, and ends it if they end it."""
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
            if sampling.stop:
                self._stream.finish()  # the withheld text may complete a stop string
            self.finish = "stop" if self._stream.stopped else "length"
        return len(ids)

    def _follow(self, constraint: "Constraint | BadWords", ids: Sequence[int]) -> None:
        """Appends tokens to the output in its grammar, and ends it where nothing may follow."""
        ended = self.finish == "stop" and ids[-1] in self.request.ends
        constraint.take(ids[:-1] if ended else ids)
        if constraint.error:
            self.finish, self.error = "error", constraint.error
        elif constraint.complete:
            self.finish = "stop"

    def _keep(self, new: NewTokens, count: int) -> None:
        """Keeps the first `count` tokens and their statistics."""
        decoded = slice(0 if self.token_ids else self._undecoded, count)
        self.token_ids += new.ids[:count]
        self.logprobs += new.logprobs[:count]
        self._logprob += sum(new.logprobs[:count])
        self._shares += new.shares[decoded].sum(0, np.float64)
        if new.layers is not None and len(new.layers[decoded]):
            self.layers = new.layers[count - 1]
            if self._keep_layers:
                self._layers += [*new.layers[decoded]]
        top_count = self.request.sampling.logprobs
        if top_count:
            assert new.top is not None
            ids, logprobs = (each[:count, :top_count].tolist() for each in new.top)
            self._top += [dict(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]

    def end(self, reason: str) -> None:
        """Ends the sequence, unless it has ended."""
        with self._lock:
            self.finish = self.finish or reason

    @property
    def shares(self) -> tuple[float | None, float | None]:
        """The mean shares attended and read; None before the first decode step."""
        steps = len(self.token_ids) - self._undecoded
        attended, read = (self._shares / max(steps, 1)).tolist()
        return (attended, read) if steps > 0 else (None, None)

    def output(self, *, new: bool = False) -> CompletionOutput:
        """Returns the output so far; while it grows, only text that is certain.

        With `new`, its tokens and text are only those since the last output.
        """
        with self._lock:
            self._advance()
            top_count = self.request.sampling.logprobs
            token, char = self._emitted if new else (0, 0)
            text, (attended, read) = self._stream.shown(char), self.shares
            self._emitted = len(self.token_ids), char + len(text)
            layers = self._layers[max(0, token - 1) :]
            return CompletionOutput(
                index=self.index,
                text=text,
                token_ids=self.token_ids[token:],
                cumulative_logprob=None if top_count is None else self._logprob,
                token_logprobs=None if top_count is None else self.logprobs[token:],
                top_logprobs=self._top[token:] if top_count else None,
                finish_reason=self.finish,
                error=self.error,
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
