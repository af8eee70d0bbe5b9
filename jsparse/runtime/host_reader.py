"""Reads results back from the device and turns them into ids, text and statistics.

The host reads each step a few steps after it was dispatched, so that the device never waits for it.
A stop rule that it finds then ends the loop; the few steps made in the meantime are dropped.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jsparse.runtime.collecting import NAN_LOGITS, NewTokens, OutputBuilder, shares
from jsparse.runtime.compilation import clock
from jsparse.runtime.decoding import Drafts, StepResult
from jsparse.runtime.prefill import OnChunk

# steps that the device may be ahead of the host; one program, where that is more
HOST_LAG = 2


@runtime_checkable
class TokenStreamer(Protocol):
    """Takes token ids as Hugging Face's streamers do."""

    def put(self, value: Any, /) -> Any:
        """Takes the prompt's ids, int[1, T], and then each new id, int[1], as numpy arrays."""

    def end(self) -> Any:
        """Is called when the answer is complete."""


Streamer = Callable[[str], Any] | TokenStreamer


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
class OutputRow:
    """Collects one prompt's answer and passes it on to a streamer.

    The first `given` tokens of its steps were not chosen but given, and are no output.
    """

    builder: OutputBuilder
    emit: Streamer
    given: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def limit(self) -> int:
        """The most tokens of its steps."""
        return self.given + self.builder.request.sampling.max_tokens

    def take(self, new: NewTokens) -> None:
        """Adds the next tokens and emits them, or the text that is certain now."""
        count = self.builder.take(new)
        if isinstance(self.emit, TokenStreamer):
            for token in new.ids[:count]:
                self.emit.put(np.array([token]))
        self._emit()

    def close(self, reason: str) -> None:
        """Ends the row, unless it has ended."""
        if self.builder.finish is None:
            self.builder.end(reason)
            self._emit()

    def _emit(self) -> None:
        if isinstance(self.emit, TokenStreamer):
            if self.builder.finish:
                self.emit.end()
        elif piece := self.builder.output(new=True).text:
            self.emit(piece)


class Reader:
    """Reads steps late, gives each row its token, and knows when all rows are done.

    Attributes:
        rows: the output of each prompt so far.
    """

    def __init__(
        self,
        rows: list[OutputRow],
        report: OnChunk = lambda *_: None,
        clock: Callable[[], float] = clock,
    ) -> None:
        """Prepares to read the steps of these rows; `clock` times them, in seconds."""
        self.rows, self._report, self._clock = rows, report, clock
        self._maximum = max(row.limit for row in rows)
        self._pending: deque[StepResult] = deque()
        self._steps, self._times = 0, list[float]()

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
        return all(row.builder.finish for row in self.rows)

    def _read(self) -> None:
        results = jax.device_get(self._pending.popleft())
        self._times.append(self._clock())
        if results.drafts is not None:
            self._count_drafts(results.drafts)
        for b, row in enumerate(self.rows):
            if row.builder.finish is None:
                self._take(row, b, results)
        self._steps += len(results.tokens)
        self._report("decode", self._done, self._maximum)

    def _take(self, row: OutputRow, b: int, results: StepResult) -> None:
        """Gives row b its tokens of one program.

        Raises:
            FloatingPointError: the model's logits are NaN.
        """
        first = min(max(0, row.given - self._steps), len(results.tokens))
        full = np.flatnonzero(results.overflow[first:, b])
        end = first + full[0] if full.size else len(results.tokens)
        if results.drafts is not None:
            end = min(end, int(results.drafts.counts[b]))
        told = np.zeros((max(end - first, 0), 2), np.float32)
        if results.stats is not None:
            told[:, 0], told[:, 1] = (share[first:end, b] for share in results.stats)
        ids, logprobs = (each[first:end, b].tolist() for each in (results.tokens, results.logprobs))
        row.take(NewTokens(ids, logprobs, shares(told)))
        if row.builder.finish == "error":
            raise FloatingPointError(
                f"prompt[{b}], token {len(row.builder.token_ids)}: {NAN_LOGITS}"
            )
        if full.size:
            row.close("overflow")

    def _count_drafts(self, drafts: Drafts) -> None:
        """Counts the drafts of each row that is not done, and those that were accepted."""
        for b, row in enumerate(self.rows):
            if row.builder.finish is None:
                row.drafted += int(drafts.drafted[b])
                row.accepted += max(int(drafts.counts[b]) - 1, 0)

    @property
    def _done(self) -> int:
        """The tokens of the row that has come furthest."""
        return max(row.given + len(row.builder.token_ids) for row in self.rows)

    def generations(self, began: float, compiling: float, policy: str) -> list[Generation]:
        """Returns the answers.

        Args:
            began: when, by the clock, the prompts were given.
            compiling: the seconds spent waiting for programs since then.
            policy: the name of the policy that decoded.
        """
        return [self._generation(row, began, compiling, policy) for row in self.rows]

    def _generation(
        self, row: OutputRow, began: float, compiling: float, policy: str
    ) -> Generation:
        times, made = self._times, [len(own.builder.token_ids) for own in self.rows]
        new = sum(max(number - 1, 0) for number in made)
        row.close("length")
        answer = row.builder.output()
        assert answer.finish_reason is not None
        stats = GenerationStats(
            prompt_tokens=len(row.builder.request.ids),
            new_tokens=len(answer.token_ids),
            prefill_seconds=times[0] - began,
            decode_tokens_per_second=new / (times[-1] - times[0]) if new else None,
            attended_fraction=answer.attended_fraction,
            read_fraction=answer.read_fraction,
            policy=policy,
            drafted_tokens=row.drafted,
            accepted_tokens=row.accepted,
            compile_seconds=compiling,
        )
        return Generation(
            answer.text, answer.token_ids, answer.finish_reason, stats, answer.token_logprobs
        )
