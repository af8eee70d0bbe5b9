"""Reads results back from the device and turns them into ids, text and statistics.

The host reads each step a few steps after it was dispatched, so that the device never waits for it.
If a stop rule matches, the loop ends, and the few steps dispatched in the meantime are dropped.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jsparse.runtime.collecting import NewTokens, OutputBuilder, shares
from jsparse.runtime.compilation import clock
from jsparse.runtime.decoding import Drafts, StepResult
from jsparse.runtime.prefill import OnChunk

# steps that the device may be ahead of the host; one program, if that is more
HOST_LAG = 2


@runtime_checkable
class TokenStreamer(Protocol):
    """A receiver of token ids with the methods of Hugging Face's streamers."""

    def put(self, value: Any, /) -> Any:
        """Receives the prompt's ids, int[1, T], and then each new id, int[1], as numpy arrays."""

    def end(self) -> Any:
        """Called when the output is complete."""


Streamer = Callable[[str], Any] | TokenStreamer


@dataclass(frozen=True)
class GenerationStats:
    """The statistics of one prompt's generation; times are those of the whole batch.

    Attributes:
        prompt_tokens, new_tokens: the number of tokens of this prompt, and of new tokens.
        prefill_seconds: the time to the first token of the batch, without compilation.
        decode_tokens_per_second: the throughput of all rows together after their first tokens,
            without compilation; None if no decode step was run.
        attended_fraction: tokens attended over positions so far, averaged over steps, layers and KV
            heads; None if no decode step was run.
        read_fraction: the same fraction for tokens whose K and V were read.
        policy: the name of the policy that decoded; for "auto" that of the chosen policy.
        drafted_tokens, accepted_tokens: with `exact`, the number of tokens that the policy drafted,
            and that dense attention accepted; otherwise 0. A token's fractions are then the means
            over the drafts of its round, 1 without drafts.
        compile_seconds: the time spent waiting for programs to be compiled or loaded from disk.
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
    """The output for one prompt.

    Attributes:
        text: the new text, without special tokens, and without the stop string unless the options
            keep it; "" if the model has no tokenizer.
        token_ids: the new ids, including the end token if there is one.
        logprobs: the ids' natural log-probabilities under the model's own softmax, before sampling
            options; None unless requested.
        finish_reason: "stop" (an end token, a stop string or the end of its grammar), "length", or
            "overflow" if the row ran out of room in the cache because the policy left too little.
        stats: counts, times and attended fractions.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[float] | None = None


@dataclass
class OutputRow:
    """Collects one prompt's output and passes it to a streamer.

    The first `given` tokens of its steps were given, not chosen, and are not part of the output.
    """

    builder: OutputBuilder
    emit: Streamer
    given: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def limit(self) -> int:
        """The maximum number of tokens of its steps."""
        return self.given + self.builder.request.sampling.max_tokens

    def take(self, new: NewTokens) -> None:
        """Adds the next tokens and emits them, or the text that is now certain."""
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
    """Reads steps late, distributes their tokens to the rows, and detects when all rows are done.

    Attributes:
        rows: the output of each prompt so far.
    """

    def __init__(
        self,
        rows: list[OutputRow],
        report: OnChunk = lambda *_: None,
        clock: Callable[[], float] = clock,
        *,
        at_once: bool = False,
    ) -> None:
        """Prepares to read the steps of these rows.

        `clock` returns seconds; `at_once` is whether each step is read before the next.
        """
        self.rows, self._report, self._clock = rows, report, clock
        self._at_once = at_once
        self._maximum = max(row.limit for row in rows)
        self._pending: deque[StepResult] = deque()
        self._steps, self._times = 0, list[float]()

    def read_all(self, steps: Iterable[StepResult]) -> None:
        """Reads steps as they are dispatched, until all rows are done; then stops iterating."""
        for step in steps:
            for array in jax.tree.leaves(step):
                array.copy_to_host_async()
            self._pending.append(step)
            # no lag for the first token: it is shown before the decode step compiles
            late = self._times and not self._at_once
            lag = max(HOST_LAG, step.tokens.shape[0]) if late else 0
            while sum(pending.tokens.shape[0] for pending in self._pending) > lag:
                self._read()
            if self.finished:
                break
        while self._pending:
            self._read()

    @property
    def finished(self) -> bool:
        """Whether all rows have ended."""
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
            FloatingPointError: the model's logits are NaN, or its grammar is too complex.
        """
        first = min(max(0, row.given - self._steps), len(results.tokens))
        full = np.flatnonzero(results.overflow[first:, b])
        end = first + full[0] if full.size else len(results.tokens)
        if results.drafts is not None:
            end = min(end, int(results.drafts.counts[b]))
        fractions = np.zeros((max(end - first, 0), 2), np.float32)
        if results.stats is not None:
            fractions[:, 0], fractions[:, 1] = (share[first:end, b] for share in results.stats)
        ids, logprobs = (each[first:end, b].tolist() for each in (results.tokens, results.logprobs))
        row.take(NewTokens(ids, logprobs, shares(fractions)))
        if row.builder.finish == "error":
            raise FloatingPointError(
                f"prompt[{b}], token {len(row.builder.token_ids)}: {row.builder.error}"
            )
        if full.size:
            row.close("overflow")

    def _count_drafts(self, drafts: Drafts) -> None:
        """Counts the drafted and the accepted tokens of each unfinished row."""
        for b, row in enumerate(self.rows):
            if row.builder.finish is None:
                row.drafted += int(drafts.drafted[b])
                row.accepted += min(max(int(drafts.counts[b]) - 1, 0), int(drafts.drafted[b]))

    @property
    def _done(self) -> int:
        """The number of tokens of the longest row so far."""
        return max(row.given + len(row.builder.token_ids) for row in self.rows)

    def generations(self, began: float, compiling: float, policy: str) -> list[Generation]:
        """Returns the outputs.

        Args:
            began: the clock's value when the prompts were submitted.
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
        output = row.builder.output()
        assert output.finish_reason is not None
        stats = GenerationStats(
            prompt_tokens=len(row.builder.request.ids),
            new_tokens=len(output.token_ids),
            prefill_seconds=times[0] - began,
            decode_tokens_per_second=new / (times[-1] - times[0]) if new else None,
            attended_fraction=output.attended_fraction,
            read_fraction=output.read_fraction,
            policy=policy,
            drafted_tokens=row.drafted,
            accepted_tokens=row.accepted,
            compile_seconds=compiling,
        )
        return Generation(
            output.text, output.token_ids, output.finish_reason, stats, output.token_logprobs
        )
