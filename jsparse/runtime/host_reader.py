"""Reads results back from the device and turns them into ids, text and statistics.

The host reads each step a few steps after it was dispatched, so that the device never waits for it.
A stop rule that it finds then ends the loop; the few steps made in the meantime are dropped.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.compilation import clock
from jsparse.runtime.decoding import Drafts, StepResult
from jsparse.runtime.prefill import OnChunk
from jsparse.runtime.request import Request
from jsparse.text.stream import TextStream

# steps that the device may be ahead of the host; one program, where that is more
HOST_LAG = 2
NAN_LOGITS = "the model's logits are NaN: weights hold NaN, or activations overflow their dtype"


@runtime_checkable
class TokenStreamer(Protocol):
    """Takes token ids as Hugging Face's streamers do."""

    def put(self, value: Any, /) -> Any:
        """Takes the prompt's ids, int[1, T], and then each new id, int[1], as numpy arrays."""

    def end(self) -> Any:
        """Is called when the answer is complete."""


Streamer = Callable[[str], Any] | TokenStreamer


def text_stream(
    tokenizer: Tokenizer | None, request: Request, turn: Sequence[int] = ()
) -> TextStream:
    """Returns the text stream of a request's answer, which `turn` precedes beside the prompt."""
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
    """Returns shares of the positions so far as reported: none is above 1."""
    # the device averages over heads and layers in float32, where ones can give 1.0000001
    return np.minimum(values, 1.0)


@dataclass(frozen=True)
class GenerationStats:
    """Holds the statistics of one prompt's generation; times are of the whole batch.

    Attributes:
        prompt_tokens, new_tokens: this prompt's number of tokens, and of new tokens.
        prefill_seconds: the time until the first token of the batch was known, without compilation.
        decode_tokens_per_second: the speed of all rows together after their first tokens, without
            compilation; None if no decode step was run.
        attended_fraction: tokens attended over positions so far, averaged over steps, layers and KV
            heads; None if no decode step was run.
        read_fraction: the same fraction for tokens whose K and V were read.
        policy: the name of the policy that decoded; for "auto" that of the one it chose.
        drafted_tokens, accepted_tokens: with `exact`, how many tokens the policy drafted, and how
            many of them dense attention accepted; 0 without. A token's fractions are the means of
            the drafts that were made with it, 1 where none was.
        compile_seconds: the time spent waiting for programs to be compiled or read from disk.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_tokens_per_second: float | None
    attended_fraction: float | None
    read_fraction: float | None
    policy: str
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Generation:
    """Holds the answer to one prompt.

    Attributes:
        text: the new text, without special tokens, and without the stop string unless the
            options keep it; "" if the model has no tokenizer.
        token_ids: the new ids, including the end token if one came.
        logprobs: the ids' natural log-probabilities under the model's own softmax, before sampling
            options; None unless requested.
        finish_reason: "stop" (an end token or a stop string), "length", or "overflow" where the
            row found no more room in the cache: the policy left too little.
        stats: counts, times and attended fractions.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[float] | None = None


@dataclass
class AnswerRow:
    """Collects one prompt's growing output on the host.

    The first `given` tokens of its steps were not chosen but given, and are no output.
    """

    request: Request
    stream: TextStream
    emit: Streamer
    given: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    attended: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    finish: str | None = None

    def take(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if isinstance(self.emit, TokenStreamer):
            self.emit.put(np.array([token]))
        is_end = token in self.request.ends
        self._emit("" if is_end else self.stream.push(token))
        if is_end or self.stream.stopped:
            self.close("stop")
        elif len(self.ids) == self.request.sampling.max_tokens:
            self.close("length")

    def close(self, reason: str) -> None:
        """Ends the row and emits the text that was held back, unless it completes a stop string."""
        if self.finish is None:
            self._emit(self.stream.finish())
            self.finish = "stop" if self.stream.stopped else reason
            if isinstance(self.emit, TokenStreamer):
                self.emit.end()

    def _emit(self, piece: str) -> None:
        if piece and not isinstance(self.emit, TokenStreamer):
            self.emit(piece)


class Reader:
    """Reads steps late, gives each row its token, and knows when all rows are done.

    Attributes:
        rows: the output of each prompt so far.
    """

    def __init__(
        self,
        rows: list[AnswerRow],
        report: OnChunk = lambda *_: None,
        clock: Callable[[], float] = clock,
    ) -> None:
        """Prepares to read the steps of these rows; `clock` times them, in seconds."""
        self.rows, self._report, self._clock = rows, report, clock
        self._maximum = max(row.given + row.request.sampling.max_tokens for row in rows)
        self._pending: deque[StepResult] = deque()
        self._times: list[float] = []

    def read_all(self, steps: Iterable[StepResult]) -> None:
        """Reads steps as they are dispatched, until all rows are done; then stops iterating."""
        for step in steps:
            for array in jax.tree.leaves(step):
                array.copy_to_host_async()
            self._pending.append(step)
            # wait for the first token, so that it is shown before the decode step compiles
            lag = max(HOST_LAG, step.tokens.shape[0]) if self._times else 0
            while sum(pending.tokens.shape[0] for pending in self._pending) > lag:
                self._read()
            if self.finished:
                break
        while self._pending:
            self._read()

    @property
    def finished(self) -> bool:
        """Whether no row wants more tokens."""
        return all(row.finish for row in self.rows)

    def _read(self) -> None:
        results = jax.device_get(self._pending.popleft())
        now = self._clock()
        if results.drafts is not None:
            self._count_drafts(results.drafts)
        for nth, (tokens, logprobs, overflow) in enumerate(
            zip(results.tokens, results.logprobs, results.overflow, strict=True)
        ):
            if self.finished:
                return
            self._times.append(now)
            for b, row in enumerate(self.rows):
                if row.finish or len(self._times) <= row.given:
                    continue
                if overflow[b]:
                    row.close("overflow")
                    continue
                if results.drafts is not None and nth >= results.drafts.counts[b]:
                    continue
                if results.stats is not None:
                    row.attended.append(float(shares(results.stats.attended[nth, b])))
                    row.read.append(float(shares(results.stats.read[nth, b])))
                if np.isnan(logprobs[b]):
                    raise FloatingPointError(f"prompt[{b}], token {len(row.ids)}: {NAN_LOGITS}")
                row.take(int(tokens[b]), float(logprobs[b]))
            self._report("decode", self._done, self._maximum)

    def _count_drafts(self, drafts: Drafts) -> None:
        """Counts the drafts of each row that is not done, and those that were accepted."""
        for b, row in enumerate(self.rows):
            if row.finish is None:
                row.drafted += int(drafts.drafted[b])
                row.accepted += max(int(drafts.counts[b]) - 1, 0)

    @property
    def _done(self) -> int:
        """The tokens of the row that has come furthest."""
        return max(row.given + len(row.ids) for row in self.rows)

    def generations(self, began: float, compiling: float, policy: str) -> list[Generation]:
        """Returns the answers.

        Args:
            began: when, by the clock, the prompts were given.
            compiling: the seconds spent waiting for programs since then.
            policy: the name of the policy that decoded.
        """
        return [self._generation(row, began, compiling, policy) for row in self.rows]

    def _generation(
        self, row: AnswerRow, began: float, compiling: float, policy: str
    ) -> Generation:
        times = self._times
        made = sum(max(len(row.ids) - 1, 0) for row in self.rows)
        stats = GenerationStats(
            prompt_tokens=len(row.request.ids),
            new_tokens=len(row.ids),
            prefill_seconds=times[0] - began,
            decode_tokens_per_second=made / (times[-1] - times[0]) if made else None,
            attended_fraction=float(np.mean(row.attended)) if row.attended else None,
            read_fraction=float(np.mean(row.read)) if row.read else None,
            policy=policy,
            drafted_tokens=row.drafted,
            accepted_tokens=row.accepted,
            compile_seconds=compiling,
        )
        return Generation(
            row.stream.text,
            row.ids,
            row.finish or "length",
            stats,
            None if row.request.sampling.logprobs is None else row.logprobs,
        )
